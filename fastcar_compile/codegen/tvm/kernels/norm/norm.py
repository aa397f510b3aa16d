"""Root-mean-square and layer normalisation of rows, alone and with dynamic int8 quantisation.

Both kernels of a norm share the macro that normalises a row, so its sums have one order. The rows that the second
kernel quantises are bit for bit those that the first kernel writes.
"""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE, script
from fastcar_compile.codegen.tvm.kernels.linear.quantize_rows import quantize_row, row_loop
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, fence, ramp

SUM_LANES = 32
"""Partial sums of a row on every instruction set, so that all have one order of summation."""


@dataclass(frozen=True)
class _Operands:
    """x float32 [m, k], w and b float32 [k], y float32 [., k]."""

    x: Any
    w: Any
    y: Any
    b: Any = None


def _value(x: Any, i: Expr, c: Expr) -> Expr:
    return x[i, c]


def _square(x: Any, i: Expr, c: Expr) -> Expr:
    return x[i, c] * x[i, c]


def _squared_deviation(x: Any, mean: Any, i: Expr, c: Expr) -> Expr:
    return (x[i, c] - mean[0]) * (x[i, c] - mean[0])


@inlined
def _sum_row(acc, k, term: Callable[[Expr], Expr]):
    """Write the sum of term(c), c < k, to acc[0]: term(c) goes to lane c mod 32, then the lanes are added in order."""
    # 32 partial sums in registers: two vectors with AVX-512, four with AVX2, eight with SSE and NEON.
    for v in T.vectorized(SUM_LANES):
        acc[v] = T.float32(0)
    for c in range(k // SUM_LANES):
        for v in T.vectorized(SUM_LANES):
            acc[v] += term(c * SUM_LANES + v)
    # The remainder is scalar, and element c is still in lane c mod 32.
    for t in range(k % SUM_LANES):
        acc[t] += term(k // SUM_LANES * SUM_LANES + t)
    # A float32 sum depends on its order: the lanes are added one after the other.
    for v in range(1, SUM_LANES):
        acc[0] += acc[v]


@inlined
def _rms_row(o, i, at, k, epsilon):
    """Write y[at] = x[i] / sqrt(mean(x[i]^2) + epsilon) * w."""
    squares = T.alloc_buffer((SUM_LANES,), "float32")
    _sum_row(squares, k, partial(_square, o.x, i))
    # squares[0] becomes the inverse root: one division per row instead of one per element.
    squares[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(k) + T.float32(epsilon))
    # The parentheses fix the roundings: first the product with the inverse root, then the one with w.
    for c in range(k):
        o.y[at, c] = (o.x[i, c] * squares[0]) * o.w[c]


@inlined
def _layer_row(o, i, at, k, epsilon):
    """Write y[at] = (x[i] - mean) / sqrt(variance + epsilon) * w + b.

    The variance takes a second pass: the deviations can be small beside the mean. The fence keeps the product with w
    and the addition of b two roundings, here and in the remainder.
    """
    mean = T.alloc_buffer((SUM_LANES,), "float32")
    squares = T.alloc_buffer((SUM_LANES,), "float32")
    _sum_row(mean, k, partial(_value, o.x, i))
    # mean[0] is the mean from here on. The second sum reads it while it takes the squares.
    mean[0] = mean[0] / T.float32(k)
    _sum_row(squares, k, partial(_squared_deviation, o.x, mean, i))
    squares[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(k) + T.float32(epsilon))
    # The fence takes all 32 lanes of a vector, so the index is a ramp and not a T.vectorized loop.
    for c in range(k // SUM_LANES):
        o.y[at, ramp(c * SUM_LANES, SUM_LANES)] = (
            fence(
                f"float32x{SUM_LANES}",
                (o.x[i, ramp(c * SUM_LANES, SUM_LANES)] - T.Broadcast(mean[0], SUM_LANES))
                * T.Broadcast(squares[0], SUM_LANES)
                * o.w[ramp(c * SUM_LANES, SUM_LANES)],
            )
            + o.b[ramp(c * SUM_LANES, SUM_LANES)]
        )
    # The remainder: the same three roundings, one element at a time.
    for t in range(k % SUM_LANES):
        c: T.let = k // SUM_LANES * SUM_LANES + t
        o.y[at, c] = fence("float32", (o.x[i, c] - mean[0]) * squares[0] * o.w[c]) + o.b[c]


@kernel
def rms_norm(m: int, k: int, epsilon: float) -> PrimFunc:
    """Return y float32 [m, k] = x / sqrt(mean(x^2) + epsilon) * w, x float32 [m, k], w float32 [k]."""
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def normalize_rows(x: T.Buffer((m, k), "float32"), w: T.Buffer((k,), "float32"), y: T.Buffer((m, k), "float32")):
        T.func_attr({"op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k])
                T.writes(y[0:m, 0:k])
                _rms_row(_Operands(x, w, y), i, i, k, epsilon)

    return normalize_rows


@kernel
def rms_norm_quantize(m: int, k: int, epsilon: float) -> PrimFunc:
    """Return q int8 [m, k] and scale float32 [m] of the rows that `rms_norm` gives."""
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def normalize_quantize_rows(
        x: T.Buffer((m, k), "float32"),
        w: T.Buffer((k,), "float32"),
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k])
                T.writes(q[0:m, 0:k], s[0:m])
                # One normalised row in float32, which quantize_row reads from the cache.
                y = T.alloc_buffer((1, k), "float32")
                _rms_row(_Operands(x, w, y), i, 0, k, epsilon)
                quantize_row(y, 0, q, s, i, k)

    return normalize_quantize_rows


@kernel
def layer_norm(m: int, k: int, epsilon: float) -> PrimFunc:
    """Return y float32 [m, k] = (x - mean) / sqrt(variance + epsilon) * w + b, x float32 [m, k], w, b float32 [k]."""
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def center_rows(
        x: T.Buffer((m, k), "float32"),
        w: T.Buffer((k,), "float32"),
        b: T.Buffer((k,), "float32"),
        y: T.Buffer((m, k), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k], b[0:k])
                T.writes(y[0:m, 0:k])
                _layer_row(_Operands(x, w, y, b), i, i, k, epsilon)

    return center_rows


@kernel
def layer_norm_quantize(m: int, k: int, epsilon: float) -> PrimFunc:
    """Return q int8 [m, k] and scale float32 [m] of the rows that `layer_norm` gives."""
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def center_quantize_rows(
        x: T.Buffer((m, k), "float32"),
        w: T.Buffer((k,), "float32"),
        b: T.Buffer((k,), "float32"),
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k], b[0:k])
                T.writes(q[0:m, 0:k], s[0:m])
                y = T.alloc_buffer((1, k), "float32")
                _layer_row(_Operands(x, w, y, b), i, 0, k, epsilon)
                quantize_row(y, 0, q, s, i, k)

    return center_quantize_rows
