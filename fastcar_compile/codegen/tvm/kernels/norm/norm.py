"""Root-mean-square and layer normalisation of rows, alone and with dynamic int8 quantisation.

Both kernels of a norm share the lines that make a row, with its sums in one order: the rows that the second one
quantises are bit for bit those that the first one gives.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.linear.quantize_rows import PARALLEL_ROW_ELEMENTS, quantize_row
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import fence

LANES = 32


@inlined
def _rms_row(x, w, i, y, at, k, epsilon):
    """y[at] = x[i] / sqrt(mean(x[i]^2) + epsilon) * w."""
    squares = T.alloc_buffer((LANES,), "float32")
    for v in T.vectorized(LANES):
        squares[v] = T.float32(0)
    for c in range(k // LANES):
        for v in T.vectorized(LANES):
            squares[v] += x[i, c * LANES + v] * x[i, c * LANES + v]
    for t in range(k % LANES):
        squares[t] += x[i, k // LANES * LANES + t] * x[i, k // LANES * LANES + t]
    for v in range(1, LANES):
        squares[0] += squares[v]
    squares[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(k) + T.float32(epsilon))
    for c in range(k):
        y[at, c] = (x[i, c] * squares[0]) * w[c]


@inlined
def _layer_row(x, w, b, i, y, at, k, epsilon):
    """y[at] = (x[i] - mean) / sqrt(variance + epsilon) * w + b; two passes, as deviations are small beside a mean."""
    sums = T.alloc_buffer((LANES,), "float32")
    squares = T.alloc_buffer((LANES,), "float32")
    for v in T.vectorized(LANES):
        sums[v] = T.float32(0)
        squares[v] = T.float32(0)
    for c in range(k // LANES):
        for v in T.vectorized(LANES):
            sums[v] += x[i, c * LANES + v]
    for t in range(k % LANES):
        sums[t] += x[i, k // LANES * LANES + t]
    for v in range(1, LANES):
        sums[0] += sums[v]
    sums[0] = sums[0] / T.float32(k)
    for c in range(k // LANES):
        for v in T.vectorized(LANES):
            squares[v] += (x[i, c * LANES + v] - sums[0]) * (x[i, c * LANES + v] - sums[0])
    for t in range(k % LANES):
        squares[t] += (x[i, k // LANES * LANES + t] - sums[0]) * (x[i, k // LANES * LANES + t] - sums[0])
    for v in range(1, LANES):
        squares[0] += squares[v]
    squares[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(k) + T.float32(epsilon))
    for c in range(k // LANES):
        y[at, T.Ramp(c * LANES, 1, LANES)] = (
            fence(
                f"float32x{LANES}",
                (x[i, T.Ramp(c * LANES, 1, LANES)] - T.Broadcast(sums[0], LANES))
                * T.Broadcast(squares[0], LANES)
                * w[T.Ramp(c * LANES, 1, LANES)],
            )
            + b[T.Ramp(c * LANES, 1, LANES)]
        )
    for t in range(k % LANES):
        c: T.let = k // LANES * LANES + t
        y[at, c] = fence("float32", (x[i, c] - sums[0]) * squares[0] * w[c]) + b[c]


def _parallel(m: int, k: int) -> bool:
    return m > 1 and m * k >= PARALLEL_ROW_ELEMENTS


@kernel
def rms_norm(m: int, k: int, epsilon: float) -> PrimFunc:
    """x float32 [m, k], w float32 [k] -> y float32 [m, k] = x / sqrt(mean(x^2) + epsilon) * w."""
    loop = T.parallel if _parallel(m, k) else T.serial

    @T.prim_func(private=True, s_tir=True)
    def normalize_rows(x: T.Buffer((m, k), "float32"), w: T.Buffer((k,), "float32"), y: T.Buffer((m, k), "float32")):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k])
                T.writes(y[0:m, 0:k])
                _rms_row(x, w, i, y, i, k, epsilon)

    return normalize_rows


@kernel
def rms_norm_quantize(m: int, k: int, epsilon: float) -> PrimFunc:
    """x float32 [m, k], w float32 [k] -> q int8 [m, k], scale float32 [m] of the normalised rows."""
    loop = T.parallel if _parallel(m, k) else T.serial

    @T.prim_func(private=True, s_tir=True)
    def normalize_quantize_rows(
        x: T.Buffer((m, k), "float32"),
        w: T.Buffer((k,), "float32"),
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k])
                T.writes(q[0:m, 0:k], s[0:m])
                y = T.alloc_buffer((1, k), "float32")
                _rms_row(x, w, i, y, 0, k, epsilon)
                quantize_row(y, 0, q, s, i, k)

    return normalize_quantize_rows


@kernel
def layer_norm(m: int, k: int, epsilon: float) -> PrimFunc:
    """x float32 [m, k], w and b float32 [k] -> y float32 [m, k] = (x - mean) / sqrt(variance + epsilon) * w + b."""
    loop = T.parallel if _parallel(m, k) else T.serial

    @T.prim_func(private=True, s_tir=True)
    def center_rows(
        x: T.Buffer((m, k), "float32"),
        w: T.Buffer((k,), "float32"),
        b: T.Buffer((k,), "float32"),
        y: T.Buffer((m, k), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k], b[0:k])
                T.writes(y[0:m, 0:k])
                _layer_row(x, w, b, i, y, i, k, epsilon)

    return center_rows


@kernel
def layer_norm_quantize(m: int, k: int, epsilon: float) -> PrimFunc:
    """x float32 [m, k], w and b float32 [k] -> q int8 [m, k], scale float32 [m] of the normalised rows."""
    loop = T.parallel if _parallel(m, k) else T.serial

    @T.prim_func(private=True, s_tir=True)
    def center_quantize_rows(
        x: T.Buffer((m, k), "float32"),
        w: T.Buffer((k,), "float32"),
        b: T.Buffer((k,), "float32"),
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k], b[0:k])
                T.writes(q[0:m, 0:k], s[0:m])
                y = T.alloc_buffer((1, k), "float32")
                _layer_row(x, w, b, i, y, 0, k, epsilon)
                quantize_row(y, 0, q, s, i, k)

    return center_quantize_rows
