"""Norm and rotary embedding of `numerics="exact"`, bit for bit as fastcar_compile.ops.exact defines them."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import numpy as np
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile import exact
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape, script
from fastcar_compile.codegen.tvm.kernels.cache.elements import power_of_two
from fastcar_compile.codegen.tvm.kernels.gate.fixed_point import INFINITY, finite_or_nan
from fastcar_compile.codegen.tvm.kernels.linear.quantize_rows import quantize_row, row_loop
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import cast, fence, magnitude_bits, ramp
from fastcar_compile.ops.cached import MANTISSA_BITS

SUM_LANES = 16
"""Partial sums of a row. They are exact, so any number gives the same bits."""


@inlined
def _norm_row(x, w, y, i, at, k, epsilon):
    """Write y[at] = x[i] / sqrt(mean(x[i]^2) + epsilon) * w."""
    top = T.alloc_buffer((SUM_LANES,), "int32")
    acc = T.alloc_buffer((SUM_LANES,), "float64")
    scale = T.alloc_buffer((2,), "float32")
    root = T.alloc_buffer((1,), "float32")
    # top and acc stay in registers: 16 maxima in int32, 16 partial sums in float64.
    for v in T.vectorized(SUM_LANES):
        top[v] = 0
        acc[v] = T.float64(0)
    # First pass, over vectors c of the row: the largest magnitude. Bits of magnitudes compare as integers.
    for c in range(k // SUM_LANES):
        for v in T.vectorized(SUM_LANES):
            top[v] = T.max(top[v], magnitude_bits(x[i, c * SUM_LANES + v], 1))
    # A maximum is exact in any order, so the remainder may meet lane 0.
    for t in range(k % SUM_LANES):
        top[0] = T.max(top[0], magnitude_bits(x[i, k // SUM_LANES * SUM_LANES + t], 1))
    for v in range(1, SUM_LANES):
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
    # Second pass, over vectors c of the row: squares. Both factors are one value, which TIR has to repeat.
    # A ramp instead of T.vectorized, because TVM scalarises a loop that holds T.nearbyint.
    for c in range(k // SUM_LANES):
        acc[ramp(0, SUM_LANES)] += cast(
            "float64", T.nearbyint(x[i, ramp(c * SUM_LANES, SUM_LANES)] * scale[1]), SUM_LANES
        ) * cast("float64", T.nearbyint(x[i, ramp(c * SUM_LANES, SUM_LANES)] * scale[1]), SUM_LANES)
    for t in range(k % SUM_LANES):
        acc[0] += T.Cast("float64", T.nearbyint(x[i, k // SUM_LANES * SUM_LANES + t] * scale[1])) * T.Cast(
            "float64", T.nearbyint(x[i, k // SUM_LANES * SUM_LANES + t] * scale[1])
        )
    # The partial sums are exact, so their order is free.
    for v in range(1, SUM_LANES):
        acc[0] += acc[v]
    # The products with the scale are exact, so that they may be contracted.
    root[0] = T.Cast("float32", acc[0]) * T.float32(np.float32(1 / k))
    root[0] = T.float32(1) / T.sqrt(fence("float32", root[0] * scale[0] * scale[0]) + T.float32(epsilon))
    # Third pass: the order of the definition, (x * root) * w, each product rounded.
    for c in range(k):
        y[at, c] = finite_or_nan(top[0], (x[i, c] * root[0]) * w[c])


@kernel
def exact_norm(m: int, k: int, epsilon: float) -> PrimFunc:
    """Return y float32 [m, k] of x float32 [m, k] and w float32 [k]."""
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def exact_norm_rows(x: T.Buffer((m, k), "float32"), w: T.Buffer((k,), "float32"), y: T.Buffer((m, k), "float32")):
        T.func_attr({"op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k], w[0:k])
                T.writes(y[0:m, 0:k])
                _norm_row(x, w, y, i, i, k, epsilon)

    return exact_norm_rows


@kernel
def exact_norm_quantize(m: int, k: int, epsilon: float) -> PrimFunc:
    """Return q int8 [m, k] and scale float32 [m] of the rows that `exact_norm` gives."""
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def exact_norm_quantize_rows(
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
                # One normalised row in float32, which the second macro reads from the cache.
                y = T.alloc_buffer((1, k), "float32")
                _norm_row(x, w, y, i, 0, k, epsilon)
                quantize_row(y, 0, q, s, i, k)

    return exact_norm_quantize_rows


@kernel
def exact_rotary(shape: HeadShape, table: tuple[int, int]) -> PrimFunc:
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
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, h, t, d), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for bi, hi, i in T.grid(b, h, t):
            with T.sblock("head"):
                T.reads(x[0:b, 0:h, 0:t, 0:d], angles[0:s, 0:r], position[0:1])
                T.writes(y[0:b, 0:h, 0:t, 0:d])
                # A position past the table reads its last row.
                # The minimum in int64 keeps the cast to int32 from wrapping.
                row: T.let = T.min(T.Cast("int32", T.min(position[0], T.int64(s))) + i, s - 1)
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
