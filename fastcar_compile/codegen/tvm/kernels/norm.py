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
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, broadcast, cast, fence, magnitude_bits, ramp, vector_lanes
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import MANTISSA_BITS

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
    _scale_deviations(o, i, at, k, mean, squares)


@script.inlined
def _scale_deviations(o, i, at, k, mean, root):
    """Write y[at] = (x[i] - mean[0]) * root[0] * w + b."""
    # The fence takes all 32 lanes of a vector, so the index is a ramp and not a T.vectorized loop.
    for c in range(k // SUM_LANES):
        o.y[at, ramp(c * SUM_LANES, SUM_LANES)] = (
            fence(
                f"float32x{SUM_LANES}",
                (o.x[i, ramp(c * SUM_LANES, SUM_LANES)] - T.Broadcast(mean[0], SUM_LANES))
                * T.Broadcast(root[0], SUM_LANES)
                * o.w[ramp(c * SUM_LANES, SUM_LANES)],
            )
            + o.b[ramp(c * SUM_LANES, SUM_LANES)]
        )
    # The remainder: the same three roundings, one element at a time.
    for t in range(k % SUM_LANES):
        c: T.let = k // SUM_LANES * SUM_LANES + t
        o.y[at, c] = fence("float32", (o.x[i, c] - mean[0]) * root[0] * o.w[c]) + o.b[c]


EXACT_SUM_LANES = 16
"""Partial sums of a row. They are exact, so any number gives the same bits."""

_EXACT = {
    "top": (EXACT_SUM_LANES, "int32"),
    "acc": (EXACT_SUM_LANES, "float64"),
    "scale": (2, "float32"),
    "root": (1, "float32"),
}
"""Temporaries of a row's exact norm."""


# The terms of exact sums: element c of row i, or `lanes` elements from there on.


def _values(x: Any, i: Expr, c: Expr, lanes: int) -> Expr:
    return x[i, ramp(c, lanes)]


def _deviations(x: Any, mean: Any, i: Expr, c: Expr, lanes: int) -> Expr:
    return x[i, ramp(c, lanes)] - broadcast(mean[0], lanes)


def _whole(term: Callable[[Expr, int], Expr], scale: Any, c: Expr, lanes: int) -> Expr:
    """Return the nearest integers as float64."""
    return cast("float64", T.nearbyint(term(c, lanes) * scale[1]), lanes)


def _whole_square(term: Callable[[Expr, int], Expr], scale: Any, c: Expr, lanes: int) -> Expr:
    # Both factors are one value, which TIR has to repeat.
    whole = _whole(term, scale, c, lanes)
    return whole * whole


@script.inlined
def _find_scale(top, scale, k, bits, term: Callable[[Expr, int], Expr]):
    """Write the bits of the row's largest magnitude to top[0], and to scale what makes it an integer of at most 2^bits.

    scale[0] is the factor of the integers, scale[1] its reciprocal.
    """
    # 16 maxima in int32 stay in registers.
    for v in T.vectorized(EXACT_SUM_LANES):
        top[v] = 0
    # Bits of magnitudes compare as integers.
    for c in range(k // EXACT_SUM_LANES):
        for v in T.vectorized(EXACT_SUM_LANES):
            top[v] = T.max(top[v], magnitude_bits(term(c * EXACT_SUM_LANES + v, 1), 1))
    # A maximum is exact in any order, so the remainder may meet lane 0.
    for t in range(k % EXACT_SUM_LANES):
        top[0] = T.max(top[0], magnitude_bits(term(k // EXACT_SUM_LANES * EXACT_SUM_LANES + t, 1), 1))
    for v in range(1, EXACT_SUM_LANES):
        top[0] = T.max(top[0], top[v])
    # A row that is not finite gets any scale, because it is NaN whatever its sum is.
    top[1] = T.Select(
        top[0] < T.int32(INFINITY),
        T.max(T.shift_right(top[0], MANTISSA_BITS), exact.NORM_FIELD) - (126 + bits),
        0,
    )
    scale[0] = power_of_two(top[1])
    scale[1] = power_of_two(0 - top[1])


@script.inlined
def _add_exactly(acc, k, term: Callable[[Expr, int], Expr]):
    """Write the sum of term(c), c < k, to acc[0]; its 16 partial sums in float64 are exact, so their order is free."""
    for v in T.vectorized(EXACT_SUM_LANES):
        acc[v] = T.float64(0)
    # A ramp instead of T.vectorized, because TVM scalarises a loop that holds T.nearbyint.
    for c in range(k // EXACT_SUM_LANES):
        acc[ramp(0, EXACT_SUM_LANES)] += term(c * EXACT_SUM_LANES, EXACT_SUM_LANES)
    for t in range(k % EXACT_SUM_LANES):
        acc[0] += term(k // EXACT_SUM_LANES * EXACT_SUM_LANES + t, 1)
    for v in range(1, EXACT_SUM_LANES):
        acc[0] += acc[v]


@script.inlined
def _find_exact_root(s, k, epsilon, term: Callable[[Expr, int], Expr]):
    """Write 1 / sqrt(mean(term(c)^2) + epsilon) to s.root[0], NaN where a term is not finite; s: of `_EXACT`."""
    # The row becomes integers of at most 2^18. Their squares are at most 2^36, and float64 adds 2^17 of them exactly.
    _find_scale(s.top, s.scale, k, exact.NORM_BITS, term)
    _add_exactly(s.acc, k, partial(_whole_square, term, s.scale))
    # The products with the scale are exact, so that they may be contracted.
    s.root[0] = T.Cast("float32", s.acc[0]) * T.float32(np.float32(1 / k))
    s.root[0] = T.float32(1) / T.sqrt(fence("float32", s.root[0] * s.scale[0] * s.scale[0]) + T.float32(epsilon))
    s.root[0] = finite_or_nan(s.top[0], s.root[0])


@script.inlined
def _exact_row(o, i, at, k, epsilon):
    """Write what `_rms_row` does, bit for bit as fastcar_compile.ir.ops.exact defines it."""
    s = script.temporaries(**_EXACT)
    _find_exact_root(s, k, epsilon, partial(_values, o.x, i))
    # The order of the definition, (x * root) * w, each product rounded.
    for c in range(k):
        o.y[at, c] = (o.x[i, c] * s.root[0]) * o.w[c]


@script.inlined
def _exact_layer_row(o, i, at, k, epsilon):
    """Write what `_layer_row` does, bit for bit as fastcar_compile.ir.ops.exact defines it."""
    s = script.temporaries(mean=(1, "float32"), **_EXACT)
    _find_scale(s.top, s.scale, k, exact.MEAN_BITS, partial(_values, o.x, i))
    _add_exactly(s.acc, k, partial(_whole, partial(_values, o.x, i), s.scale))
    # The second product is exact, so that the difference may be contracted with it.
    s.mean[0] = T.Cast("float32", s.acc[0]) * T.float32(np.float32(1 / k)) * s.scale[0]
    _find_exact_root(s, k, epsilon, partial(_deviations, o.x, s.mean, i))
    _scale_deviations(o, i, at, k, s.mean, s.root)


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

exact_layer_norm = partial(_norm, _exact_layer_row, True)
exact_layer_norm_quantize = partial(_norm_quantize, _exact_layer_row, True)
"""The layer norm of `numerics="exact"`."""

layer_norm, layer_norm_quantize = partial(_norm, _layer_row, True), partial(_norm_quantize, _layer_row, True)
"""(x - mean) / sqrt(variance + epsilon) * w + b of rows (m, k, epsilon), and these rows quantised."""


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
