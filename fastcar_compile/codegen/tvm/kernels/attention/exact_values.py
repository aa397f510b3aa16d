"""Exact attention: the numerators of the softmax, and the values of an int8 cache that they weigh."""

from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.attention.exact_shape import (
    LANES,
    UNSEEN,
    ExactShape,
    Int16Dot,
    tiles_of,
    wide_exponent,
)
from fastcar_compile.codegen.tvm.kernels.cache import power_of_two
from fastcar_compile.codegen.tvm.kernels.tas import INFINITY
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, broadcast, cast, fence, magnitude_bits, ramp
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import BLOCK
from fastcar_compile.ir.ops.operator import NOT_A_NUMBER as NAN_EXPONENT


def _knot(units: Expr, lanes: int = 1) -> Expr:
    # Bits 8 to 15 of the fraction choose one of 256 knots. The lower 8 bits interpolate behind it.
    return T.bitwise_and(
        T.shift_right(units, broadcast(T.int32(8), lanes)), broadcast(T.int32(exact.EXP_KNOTS - 1), lanes)
    )


def _power(low: Expr, high: Expr, units: Expr) -> Expr:
    """Return 2^(units / 65536) as integers of 2^-24, from the knots around the fraction."""

    def each(value: int) -> Expr:
        return T.Broadcast(T.int32(value), LANES)

    # The shift is minus the integer part, 0 to 30: what is above it are the bits of `rounded`.
    shift = each(vectors.ROUNDED >> exact.EXP_INPUT_BITS) - T.shift_right(units, each(exact.EXP_INPUT_BITS))
    # Linear between two knots, rounded half up. The product is below 2^31: neighbours differ by less than 2^17.
    power = low + T.shift_right((high - low) * T.bitwise_and(units, each(255)) + each(128), each(8))
    # The shift rounds half up too, and nothing for a shift of 0. One shift by lanes: some instruction sets have none.
    return T.shift_right(T.shift_right(power + power, shift) + each(1), each(1))


@script.inlined
def round_logits(sums, number, logits, most):
    """Write vector `number` of sums.units: 16 logits in fixed point, as `rounded`. A NaN is taken for the limit."""
    # T.max gives its second operand where the first is a NaN.
    sums.units[vectors.vector(number, LANES)] = vectors.rounded(
        T.max(logits - most, T.Broadcast(T.float32(exact.EXP_LIMIT), LANES))
        * T.Broadcast(T.float32(1 << exact.EXP_INPUT_BITS), LANES),
        LANES,
    )


@script.inlined
def numerators(read, table, sums, number):
    """Write the numerators of a vector of sums.units to sums.power; that of the limit is 0."""
    read(table, sums.units, sums.low, sums.high, _knot, number * LANES)
    sums.power[ramp(0, LANES)] = _power(
        sums.low[ramp(0, LANES)], sums.high[ramp(0, LANES)], sums.units[vectors.vector(number, LANES)]
    )


@script.inlined
def weigh(read, o, sums, rows):
    """Write the numerators of whole tiles, UNSEEN where the logit is NaN, and their sum to sums.count[0]."""
    sums.count[0] = T.int64(0)
    for part in range(tiles_of(rows) * (BLOCK // LANES)):
        round_logits(sums, 0, sums.logits[ramp(part * LANES, LANES)], T.Broadcast(sums.stat[0], LANES))
        numerators(read, o.table, sums, 0)
        sums.weights[ramp(part * LANES, LANES)] = T.Select(
            magnitude_bits(sums.logits[ramp(part * LANES, LANES)], LANES) <= T.Broadcast(T.int32(INFINITY), LANES),
            sums.power[ramp(0, LANES)],
            T.Broadcast(T.int32(UNSEEN), LANES),
        )
        # 16 numerators of at most 2^24 fit int32.
        sums.count[0] = sums.count[0] + T.Cast("int64", vectors.reduce_add(sums.power[ramp(0, LANES)], LANES))


def _largest(values: Expr) -> Expr:
    return vectors.intrinsic("int32", f"llvm.vector.reduce.smax.v{BLOCK}i32", values)


@script.inlined
def _scale_weights(d, whole, o, sums, start, count, e):
    # Exponents of the tile's rows in this block of columns. Rows past the last one get 0.
    sums.integers[ramp(0, BLOCK)] = T.Broadcast(T.int32(0), BLOCK)
    for j in range(count):
        sums.integers[j] = T.Cast("int32", o.values[o.at[4], o.at[2], start + j, d + e])
    # weight - UNSEEN is 0 for a row that is not seen and positive for one that is.
    sums.columns[e] = T.max(
        sums.columns[e],
        _largest(
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
        T.max(sums.integers[whole] - T.Broadcast(T.int32(exact.EXP_BITS), BLOCK), T.Broadcast(T.int32(-126), BLOCK)),
        BLOCK,
    )
    # The 32 scaled numerators become one wide block, so that the products with mantissas are integers.
    sums.integers[BLOCK] = wide_exponent(_largest(magnitude_bits(sums.scaled[whole], BLOCK)))
    sums.integers[whole] = cast(
        "int32", T.nearbyint(sums.scaled[whole] * T.Broadcast(power_of_two(0 - sums.integers[BLOCK]), BLOCK)), BLOCK
    )


def _columns(dot: Int16Dot, o: Any, shape: ExactShape, j: Expr, start: Expr, column: Expr) -> Expr:
    """Return `shape.run` columns from `column` on of row j of a tile, or of two rows, whose columns are in turn."""
    rows = [T.min(start + dot.pair * j + k, shape.s - 1) for k in range(dot.pair)]
    loads = [o.values[o.at[4], o.at[2], row, ramp(column, shape.run)] for row in rows]
    order = [lane + shape.run * k for lane in range(shape.run) for k in range(2)]
    return cast("int16", loads[0] if dot.pair == 1 else T.Shuffle(loads, order), shape.run * dot.pair)


def _factors(dot: Int16Dot, sums: Any, j: Expr) -> Expr:
    if dot.pair == 1:
        return broadcast(sums.factors[j], dot.lanes)
    # A last row that has no neighbour meets a factor of zero.
    both = T.reinterpret("int32", sums.factors[ramp(2 * j, 2)])
    return T.reinterpret(f"int16x{dot.width}", T.Broadcast(both, dot.lanes))


@script.inlined
def _add_tile(shape, dot, whole, o, sums, start, count, e):
    sums.acc[whole] = T.Broadcast(T.int32(0), BLOCK)
    sums.factors[whole] = cast("int16", sums.integers[whole], BLOCK)
    # j: rows of the tile, or pairs of them. v: parts of the block's columns; sums and columns are in registers.
    # 32 products of at most 2^14 * 2^7 are exact in int32.
    for j in range((count + dot.pair - 1) // dot.pair):
        for v in T.unroll(BLOCK // shape.run):
            # The last block of columns may be shorter than 32.
            if e * BLOCK + v * shape.run < shape.d:
                sums.parts[ramp(0, shape.run * dot.pair)] = _columns(dot, o, shape, j, start, e * BLOCK + v * shape.run)
                for u in T.unroll(shape.run // dot.lanes):
                    sums.acc[ramp(v * shape.run + u * dot.lanes, dot.lanes)] = dot.step(
                        sums.acc[ramp(v * shape.run + u * dot.lanes, dot.lanes)],
                        _factors(dot, sums, j),
                        sums.parts[ramp(u * dot.width, dot.width)],
                    )
    # Tiles are added in float32 in the order of the cache. The fence rounds the product before the addition.
    sums.out[ramp(e * BLOCK, BLOCK)] = sums.out[ramp(e * BLOCK, BLOCK)] + fence(
        f"float32x{BLOCK}",
        cast("float32", sums.acc[whole], BLOCK) * T.Broadcast(power_of_two(sums.integers[BLOCK]), BLOCK),
    )


@script.inlined
def add_values(shape, o, sums, rows):
    """Write the weighted values to sums.out, and 1 to sums.columns where a block of a row that is seen holds a NaN."""
    for e in range(shape.blocks):
        sums.columns[e] = 0
        sums.out[ramp(e * BLOCK, BLOCK)] = T.Broadcast(T.float32(0), BLOCK)
    # tile: 32 rows in the order of the memory. e: blocks of columns, each with an exponent of its own.
    for tile in range(tiles_of(rows)):
        for e in range(shape.blocks):
            count = T.meta_var(T.min(rows - tile * BLOCK, BLOCK))
            _scale_weights(shape.d, ramp(0, BLOCK), o, sums, tile * BLOCK, count, e)
            _add_tile(shape, shape.dot, ramp(0, BLOCK), o, sums, tile * BLOCK, count, e)
