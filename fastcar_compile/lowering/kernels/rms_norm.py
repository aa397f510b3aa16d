"""Root-mean-square normalisation of rows, alone and with dynamic int8 quantisation.

Both kernels take the sum of squares in the same order, and nothing after it is a sum: the rows that the second one
quantises are bit for bit those that the first one gives.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.kernels import OPAQUE
from fastcar_compile.lowering.kernels.quantize_rows import INV_127, PARALLEL_ELEMENTS, TINY, quantized

LANES = 32


def rms_norm(m: int, k: int, epsilon: float) -> PrimFunc:
    """x float32 [m, k], w float32 [k] -> y float32 [m, k] = x / sqrt(mean(x^2) + epsilon) * w."""
    whole, tail = k // LANES, k % LANES
    loop = T.parallel if m > 1 and m * k >= PARALLEL_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def normalize_rows(x: T.Buffer((m, k), "float32"), w: T.Buffer((k,), "float32"), y: T.Buffer((m, k), "float32")):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k])
                T.writes(y[0:m, 0:k])
                squares = T.alloc_buffer((LANES,), "float32")
                for v in T.vectorized(LANES):
                    squares[v] = T.float32(0)
                for c in range(whole):
                    for v in T.vectorized(LANES):
                        squares[v] += x[i, c * LANES + v] * x[i, c * LANES + v]
                for t in range(tail):
                    squares[t] += x[i, whole * LANES + t] * x[i, whole * LANES + t]
                for v in range(1, LANES):
                    squares[0] += squares[v]
                squares[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(k) + T.float32(epsilon))
                for c in range(k):
                    y[i, c] = (x[i, c] * squares[0]) * w[c]

    return normalize_rows


def rms_norm_quantize(m: int, k: int, epsilon: float) -> PrimFunc:
    """x float32 [m, k], w float32 [k] -> q int8 [m, k], scale float32 [m] of the normalised rows."""
    whole, tail = k // LANES, k % LANES
    loop = T.parallel if m > 1 and m * k >= PARALLEL_ELEMENTS else T.serial

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
                squares = T.alloc_buffer((LANES,), "float32")
                largest = T.alloc_buffer((LANES,), "float32")
                inverse = T.alloc_buffer((1,), "float32")
                y = T.alloc_buffer((k,), "float32")
                for v in T.vectorized(LANES):
                    squares[v] = T.float32(0)
                    largest[v] = T.float32(TINY)
                for c in range(whole):
                    for v in T.vectorized(LANES):
                        squares[v] += x[i, c * LANES + v] * x[i, c * LANES + v]
                for t in range(tail):
                    squares[t] += x[i, whole * LANES + t] * x[i, whole * LANES + t]
                for v in range(1, LANES):
                    squares[0] += squares[v]
                squares[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(k) + T.float32(epsilon))
                for c in range(whole):
                    for v in T.vectorized(LANES):
                        y[c * LANES + v] = (x[i, c * LANES + v] * squares[0]) * w[c * LANES + v]
                    for v in T.vectorized(LANES):
                        largest[v] = T.max(largest[v], T.fabs(y[c * LANES + v]))
                for t in range(tail):
                    y[whole * LANES + t] = (x[i, whole * LANES + t] * squares[0]) * w[whole * LANES + t]
                    largest[0] = T.max(largest[0], T.fabs(y[whole * LANES + t]))
                for v in range(1, LANES):
                    largest[0] = T.max(largest[0], largest[v])
                inverse[0] = T.float32(127.0) / largest[0]
                s[i] = largest[0] * T.float32(INV_127)
                for c in range(k):
                    q[i, c] = quantized(y[c], inverse[0])

    return normalize_quantize_rows
