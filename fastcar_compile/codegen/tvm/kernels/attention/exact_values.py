"""Exact attention: the numerators of the softmax, and the values of an int8 cache that they weigh."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from fastcar_compile import exact
from fastcar_compile.codegen.tvm.kernels.attention.exact_state import UNSEEN, ExactShape, tiles_of, wide_exponent
from fastcar_compile.codegen.tvm.kernels.cache.elements import power_of_two
from fastcar_compile.codegen.tvm.kernels.gate.fixed_point import INFINITY
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import (
    Expr,
    broadcast,
    cast,
    fence,
    intrinsic,
    magnitude_bits,
    ramp,
    reduce_add,
)
from fastcar_compile.ops.cached import BLOCK
from fastcar_compile.ops.cached import NOT_A_NUMBER as NAN_EXPONENT

LANES = 16
"""Numerators of a vector."""


def _knot(units: Expr) -> Expr:
    # Bits 8 to 15 of the fraction choose one of 256 knots. The lower 8 bits interpolate behind it.
    return T.bitwise_and(T.shift_right(units, 8), exact.EXP_KNOTS - 1)


def _power(low: Expr, high: Expr, units: Expr) -> Expr:
    """Return 2^(units / 65536) as integers of 2^-24, from the knots around the fraction."""

    def each(value: int) -> Expr:
        return T.Broadcast(T.int32(value), LANES)

    # The shift is minus the integer part, 0 to 30. The mask keeps it legal for lanes that are not used.
    shift = T.bitwise_and(each(0) - T.shift_right(units, each(exact.EXP_INPUT_BITS)), each(31))
    # Linear between two knots, rounded half up. The product is below 2^31: neighbours differ by less than 2^17.
    power = low + T.shift_right((high - low) * T.bitwise_and(units, each(255)) + each(128), each(8))
    # The shift rounds half up too: half of 2^shift is added first, and nothing for a shift of 0.
    return T.shift_right(power + T.shift_right(T.shift_left(each(1), shift), each(1)), shift)


@inlined
def weigh(o, sums, rows, stat, count):
    """Write the numerators of whole tiles, UNSEEN where the logit is NaN, and their sum to count[0]."""
    units = T.alloc_buffer((LANES,), "int32")
    low = T.alloc_buffer((LANES,), "int32")
    high = T.alloc_buffer((LANES,), "int32")
    count[0] = T.int64(0)
    # part: 16 logits. The arithmetic is in vectors, and only the table is read one lane at a time.
    for part in range(tiles_of(rows) * (BLOCK // LANES)):
        # T.max gives its second operand where the first is a NaN.
        units[ramp(0, LANES)] = cast(
            "int32",
            T.nearbyint(
                T.max(
                    sums.logits[ramp(part * LANES, LANES)] - T.Broadcast(stat[0], LANES),
                    T.Broadcast(T.float32(exact.EXP_LIMIT), LANES),
                )
                * T.Broadcast(T.float32(1 << exact.EXP_INPUT_BITS), LANES)
            ),
            LANES,
        )
        for v in T.unroll(LANES):
            low[v] = o.table[_knot(units[v])]
            high[v] = o.table[_knot(units[v]) + 1]
        sums.weights[ramp(part * LANES, LANES)] = T.Select(
            magnitude_bits(sums.logits[ramp(part * LANES, LANES)], LANES) <= T.Broadcast(T.int32(INFINITY), LANES),
            _power(low[ramp(0, LANES)], high[ramp(0, LANES)], units[ramp(0, LANES)]),
            T.Broadcast(T.int32(UNSEEN), LANES),
        )
        # The maximum with 0 takes UNSEEN out of the sum. 16 numerators of at most 2^24 fit int32.
        count[0] = count[0] + T.Cast(
            "int64",
            reduce_add(T.max(sums.weights[ramp(part * LANES, LANES)], T.Broadcast(T.int32(0), LANES)), LANES),
        )


def add_values_of(shape: ExactShape) -> Callable[..., None]:
    """Return the macro (o, sums, rows, out, unknown): out float32 [n * 32] becomes the weighted values.

    unknown int32 [n] becomes 1 where a block of a row that is seen holds a NaN.
    """
    d, lanes = shape.d, shape.lanes
    vectors = BLOCK // lanes
    whole = ramp(0, BLOCK)

    def largest(values: Expr) -> Expr:
        return intrinsic("int32", f"llvm.vector.reduce.smax.v{BLOCK}i32", values)

    @inlined
    def scale_weights(o, sums, start, count, e, unknown):
        # Exponents of the tile's rows in this block of columns. Rows past the last one get 0.
        sums.integers[ramp(0, BLOCK)] = T.Broadcast(T.int32(0), BLOCK)
        for j in range(count):
            sums.integers[j] = T.Cast("int32", o.values[o.at[0], o.at[2], start + j, d + e])
        # weight - UNSEEN is 0 for a row that is not seen and positive for one that is.
        unknown[e] = T.max(
            unknown[e],
            largest(
                T.Select(
                    sums.integers[whole] == T.Broadcast(T.int32(NAN_EXPONENT), BLOCK),
                    sums.weights[ramp(start, BLOCK)] - T.Broadcast(T.int32(UNSEEN), BLOCK),
                    T.Broadcast(T.int32(0), BLOCK),
                )
            ),
        )
        # Numerators are integers of 2^-24, so EXP_BITS leaves the exponent. From -126 on the power is normal.
        sums.scaled[whole] = cast(
            "float32", T.max(sums.weights[ramp(start, BLOCK)], T.Broadcast(T.int32(0), BLOCK)), BLOCK
        ) * power_of_two(
            T.max(
                sums.integers[whole] - T.Broadcast(T.int32(exact.EXP_BITS), BLOCK),
                T.Broadcast(T.int32(-126), BLOCK),
            ),
            BLOCK,
        )
        # The 32 scaled numerators become one wide block, so that the products with mantissas are integers.
        sums.integers[BLOCK] = wide_exponent(largest(magnitude_bits(sums.scaled[whole], BLOCK)))
        sums.integers[whole] = cast(
            "int32",
            T.nearbyint(sums.scaled[whole] * T.Broadcast(power_of_two(0 - sums.integers[BLOCK]), BLOCK)),
            BLOCK,
        )

    @inlined
    def add_tile(o, sums, start, count, e, out):
        sums.acc[whole] = T.Broadcast(T.int32(0), BLOCK)
        # j: rows of the tile. v: vectors of the block's columns, whose sums are in registers.
        # 32 products of at most 2^14 * 2^7 are exact in int32.
        for j in range(count):
            for v in T.unroll(vectors):
                # The last block of columns may be shorter than 32.
                if e * BLOCK + v * lanes < d:
                    sums.acc[ramp(v * lanes, lanes)] = sums.acc[ramp(v * lanes, lanes)] + broadcast(
                        sums.integers[j], lanes
                    ) * cast("int32", o.values[o.at[0], o.at[2], start + j, ramp(e * BLOCK + v * lanes, lanes)], lanes)
        # Tiles are added in float32 in the order of the cache. The fence rounds the product before the addition.
        out[ramp(e * BLOCK, BLOCK)] = out[ramp(e * BLOCK, BLOCK)] + fence(
            f"float32x{BLOCK}",
            cast("float32", sums.acc[whole], BLOCK) * T.Broadcast(power_of_two(sums.integers[BLOCK]), BLOCK),
        )

    @inlined
    def add_values(o, sums, rows, out, unknown):
        for e in range(shape.blocks):
            unknown[e] = 0
            out[ramp(e * BLOCK, BLOCK)] = T.Broadcast(T.float32(0), BLOCK)
        # tile: 32 rows in the order of the memory. e: blocks of columns, each with an exponent of its own.
        for tile in range(tiles_of(rows)):
            for e in range(shape.blocks):
                scale_weights(o, sums, tile * BLOCK, T.min(rows - tile * BLOCK, BLOCK), e, unknown)
                add_tile(o, sums, tile * BLOCK, T.min(rows - tile * BLOCK, BLOCK), e, out)

    return add_values
