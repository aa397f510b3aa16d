"""Root-mean-square and layer normalisation of rows, alone and with dynamic int8 quantisation.

Both kernels of a norm share the macro that normalises a row, so its sums have one order. The rows that the second
kernel quantises are bit for bit those that the first kernel writes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.cache import number_of, power_of_two
from fastcar_compile.codegen.tvm.kernels.linear.activations import quantize_row, row_loop
from fastcar_compile.codegen.tvm.kernels.tas import INFINITY, finite_or_nan
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, cast, fence, magnitude_bits, ramp, vector_lanes
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import MANTISSA_BITS

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


SUM_LANES = 32
"""Partial sums of a row on every instruction set, so that all have one order of summation."""


# The macros of rows take operands o: x float32 [m, k], w and b float32 [k], y float32 [., k].


def _value(x: Any, i: Expr, c: Expr) -> Expr:
    return x[i, c]


def _square(x: Any, i: Expr, c: Expr) -> Expr:
    return x[i, c] * x[i, c]


def _squared_deviation(x: Any, mean: Any, i: Expr, c: Expr) -> Expr:
    return (x[i, c] - mean[0]) * (x[i, c] - mean[0])


@script.inlined
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


@script.inlined
def _rms_row(o, i, at, k, epsilon):
    """Write y[at] = x[i] / sqrt(mean(x[i]^2) + epsilon) * w."""
    squares = T.alloc_buffer((SUM_LANES,), "float32")
    _sum_row(squares, k, partial(_square, o.x, i))
    # squares[0] becomes the inverse root: one division per row instead of one per element.
    squares[0] = T.float32(1) / T.sqrt(squares[0] / T.float32(k) + T.float32(epsilon))
    # The parentheses fix the roundings: first the product with the inverse root, then the one with w.
    for c in range(k):
        o.y[at, c] = (o.x[i, c] * squares[0]) * o.w[c]


@script.inlined
def _layer_row(o, i, at, k, epsilon):
    """Write y[at] = (x[i] - mean) / sqrt(variance + epsilon) * w + b.

    The variance takes a second pass: the deviations can be small beside the mean. The fence keeps the product with w
    and the addition of b two roundings, here and in the remainder.
    """
    mean, squares = script.buffers(2, SUM_LANES)
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


EXACT_SUM_LANES = 16
"""Partial sums of a row. They are exact, so any number gives the same bits."""


def _whole_square(value: Expr, lanes: int) -> Expr:
    """Return the square of the nearest integers as float64."""
    # Both factors are one value, which TIR has to repeat.
    whole = cast("float64", T.nearbyint(value), lanes)
    return whole * whole


@script.inlined
def _exact_row(o, i, at, k, epsilon):
    """Write what `_rms_row` does, bit for bit as fastcar_compile.ir.ops.exact defines it."""
    top = T.alloc_buffer((EXACT_SUM_LANES,), "int32")
    acc = T.alloc_buffer((EXACT_SUM_LANES,), "float64")
    scale = T.alloc_buffer((2,), "float32")
    root = T.alloc_buffer((1,), "float32")
    # top and acc stay in registers: 16 maxima in int32, 16 partial sums in float64.
    for v in T.vectorized(EXACT_SUM_LANES):
        top[v] = 0
        acc[v] = T.float64(0)
    # First pass, over vectors c of the row: the largest magnitude. Bits of magnitudes compare as integers.
    for c in range(k // EXACT_SUM_LANES):
        for v in T.vectorized(EXACT_SUM_LANES):
            top[v] = T.max(top[v], magnitude_bits(o.x[i, c * EXACT_SUM_LANES + v], 1))
    # A maximum is exact in any order, so the remainder may meet lane 0.
    for t in range(k % EXACT_SUM_LANES):
        top[0] = T.max(top[0], magnitude_bits(o.x[i, k // EXACT_SUM_LANES * EXACT_SUM_LANES + t], 1))
    for v in range(1, EXACT_SUM_LANES):
        top[0] = T.max(top[0], top[v])
    # The sign of a shift; a row that is not finite gets any, because it is NaN whatever its sum is.
    # The row becomes integers of at most 2^18. Their squares are at most 2^36, and float64 adds 2^17 of them exactly.
    top[1] = T.Select(
        top[0] < T.int32(INFINITY),
        T.max(T.shift_right(top[0], MANTISSA_BITS), exact.NORM_FIELD) - (126 + exact.NORM_BITS),
        0,
    )
    scale[0] = power_of_two(top[1])
    scale[1] = power_of_two(0 - top[1])
    # Second pass, over vectors c of the row: squares.
    # A ramp instead of T.vectorized, because TVM scalarises a loop that holds T.nearbyint.
    for c in range(k // EXACT_SUM_LANES):
        acc[ramp(0, EXACT_SUM_LANES)] += _whole_square(
            o.x[i, ramp(c * EXACT_SUM_LANES, EXACT_SUM_LANES)] * scale[1], EXACT_SUM_LANES
        )
    for t in range(k % EXACT_SUM_LANES):
        acc[0] += _whole_square(o.x[i, k // EXACT_SUM_LANES * EXACT_SUM_LANES + t] * scale[1], 1)
    # The partial sums are exact, so their order is free.
    for v in range(1, EXACT_SUM_LANES):
        acc[0] += acc[v]
    # The products with the scale are exact, so that they may be contracted.
    root[0] = T.Cast("float32", acc[0]) * T.float32(np.float32(1 / k))
    root[0] = T.float32(1) / T.sqrt(fence("float32", root[0] * scale[0] * scale[0]) + T.float32(epsilon))
    # Third pass: the order of the definition, (x * root) * w, each product rounded.
    for c in range(k):
        o.y[at, c] = finite_or_nan(top[0], (o.x[i, c] * root[0]) * o.w[c])


@script.kernel
def _norm(row: Callable[..., None], biased: bool, m: int, k: int, epsilon: float) -> PrimFunc:
    """Return y float32 [m, k] of x float32 [m, k], w float32 [k] and, where `biased`, b float32 [k].

    The macro `row` writes one row.
    """
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def normalize_rows(
        x: T.Buffer((m, k), "float32"),
        w: T.Buffer((k,), "float32"),
        b: T.Buffer((k,), "float32"),
        y: T.Buffer((m, k), "float32"),
    ):
        for i in loop(m):
            with T.sblock("row"):
                script.access([x, w, b] if biased else [x, w], [y])
                o = script.temporaries(x=x, w=w, y=y, b=b)
                row(o, i, i, k, epsilon)

    return normalize_rows if biased else script.without(normalize_rows, 2)


@script.kernel
def _norm_quantize(row: Callable[..., None], biased: bool, m: int, k: int, epsilon: float) -> PrimFunc:
    """Return q int8 [m, k] and scale float32 [m] of the rows that `_norm` gives."""
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def normalize_quantize_rows(
        x: T.Buffer((m, k), "float32"),
        w: T.Buffer((k,), "float32"),
        b: T.Buffer((k,), "float32"),
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
    ):
        for i in loop(m):
            with T.sblock("row"):
                script.access([x, w, b] if biased else [x, w], [q, s])
                # One normalised row in float32, which quantize_row reads from the cache.
                o = script.temporaries(x=x, w=w, y=(1, k, "float32"), b=b)
                row(o, i, 0, k, epsilon)
                quantize_row(o.y, 0, q, s, i, k)

    return normalize_quantize_rows if biased else script.without(normalize_quantize_rows, 2)


rms_norm, rms_norm_quantize = partial(_norm, _rms_row, False), partial(_norm_quantize, _rms_row, False)
"""x / sqrt(mean(x^2) + epsilon) * w of rows (m, k, epsilon), and these rows quantised."""

exact_norm, exact_norm_quantize = partial(_norm, _exact_row, False), partial(_norm_quantize, _exact_row, False)
"""The same with the bits of `numerics="exact"`."""

layer_norm, layer_norm_quantize = partial(_norm, _layer_row, True), partial(_norm_quantize, _layer_row, True)
"""(x - mean) / sqrt(variance + epsilon) * w + b of rows (m, k, epsilon), and these rows quantised."""


# Rotary position embedding of queries or keys.


PARALLEL_ROTARY_ELEMENTS = 1 << 17
"""Elements from which a second thread pays for launching and awaiting a parallel region."""


@script.kernel
def rotary(shape: HeadShape, tables: int) -> PrimFunc:
    """Return x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin, x float32 [B, H, T, D].

    cos and sin are float32 [tables, 1, T, D], tables 1 or B. Parallel over heads.
    """
    b, h, t, d = shape
    half = d // 2
    lanes = vector_lanes(half)
    loop = T.parallel if b * h > 1 and b * h * t * d >= PARALLEL_ROTARY_ELEMENTS else T.serial

    @script.prim_func(private=True, s_tir=True)
    def rotate(
        x: T.Buffer((b, h, t, d), "float32"),
        cos: T.Buffer((tables, 1, t, d), "float32"),
        sin: T.Buffer((tables, 1, t, d), "float32"),
        y: T.Buffer((b, h, t, d), "float32"),
    ):
        for head in loop(b * h):
            # i: query rows. c: vectors of half a head. v: one vector; both halves of a pair are computed together.
            for i, c in T.grid(t, half // lanes):
                with T.sblock("lanes"):
                    script.access([x, cos, sin], [y])
                    bi: T.let = head // h
                    hi: T.let = head % h
                    # One table of angles serves the whole batch, or every batch row has its own.
                    e: T.let = bi % tables
                    at: T.let = c * lanes
                    # First half: x1 * cos - x2 * sin, with x1 and x2 the halves of a head.
                    for v in T.vectorized(lanes):
                        y[bi, hi, i, at + v] = (
                            x[bi, hi, i, at + v] * cos[e, 0, i, at + v]
                            - x[bi, hi, i, half + at + v] * sin[e, 0, i, at + v]
                        )
                    for v in T.vectorized(lanes):
                        y[bi, hi, i, half + at + v] = (
                            x[bi, hi, i, half + at + v] * cos[e, 0, i, half + at + v]
                            + x[bi, hi, i, at + v] * sin[e, 0, i, half + at + v]
                        )

    return rotate


# The rotary embedding of `numerics="exact"`, bit for bit as fastcar_compile.ir.ops.exact defines it.


@script.kernel
def exact_rotary(shape: HeadShape, table: tuple[int, int], positions: int = 1) -> PrimFunc:
    """Return x float32 [B, H, T, D] with its first R elements rotated, by row position + t of a table float32 [S, R].

    The fences keep LLVM from contracting a product with the sum behind it.
    """
    b, h, t, d = shape
    s, r = table
    half = r // 2

    @script.prim_func(private=True, s_tir=True)
    def exact_rotate(
        x: T.Buffer((b, h, t, d), "float32"),
        angles: T.Buffer((s, r), "float32"),
        position: T.Buffer((positions,), "int64"),
        y: T.Buffer((b, h, t, d), "float32"),
    ):
        for bi, hi, i in T.grid(b, h, t):
            with T.sblock("head"):
                script.access([x, angles, position], [y])
                # A position past the table reads its last row.
                # The minimum in int64 keeps the cast to int32 from wrapping.
                at: T.let = T.max(T.min(number_of(position, bi), T.int64(s)), T.int64(0))
                row: T.let = T.min(T.Cast("int32", at) + i, s - 1)
                # c: pairs of elements c and half + c. A row of the table has R / 2 cosines, then R / 2 sines.
                for c in range(half):
                    y[bi, hi, i, c] = fence("float32", x[bi, hi, i, c] * angles[row, c]) - fence(
                        "float32", x[bi, hi, i, half + c] * angles[row, half + c]
                    )
                    y[bi, hi, i, half + c] = fence("float32", x[bi, hi, i, half + c] * angles[row, c]) + fence(
                        "float32", x[bi, hi, i, c] * angles[row, half + c]
                    )
                # Elements from R on are not rotated.
                for c in range(d - r):
                    y[bi, hi, i, r + c] = x[bi, hi, i, r + c]

    return exact_rotate
