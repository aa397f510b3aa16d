"""Attention of `numerics="exact"`, bit for bit as fastcar_compile.ir.ops.exact defines it.

Two passes over the cached rows: one over the keys, whose logits are kept, and one over the values. Integer products are
in int32 lanes on every instruction set; a fence stands where LLVM could contract a product with the sum behind it.
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script, vectors
from fastcar_compile.codegen.tvm.kernels.attention.decode import PARALLEL_CACHE_ELEMENTS
from fastcar_compile.codegen.tvm.kernels.cache import bounded, exponent_of, number_of, power_of_two
from fastcar_compile.codegen.tvm.kernels.linear.activations import read_knots
from fastcar_compile.codegen.tvm.kernels.tas import INFINITY, NOT_A_NUMBER
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, broadcast, cast, fence, magnitude_bits, ramp
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import BLOCK, INT8_MAX, LEAST_EXPONENT
from fastcar_compile.ir.ops.operator import NOT_A_NUMBER as NAN_EXPONENT

# What the parts of exact attention share: the shape, the operands, and the temporaries of one query row.


LANES = 16
"""Numerators of a vector."""

UNSEEN = -1
"""Numerator of a cache row that the query does not see."""


def tiles_of(rows: Any) -> Any:
    """Return the tiles that hold so many rows."""
    return (rows + BLOCK - 1) // BLOCK


@dataclass(frozen=True)
class ExactShape:
    """D, S, (sinks, window) of a ring cache, and what a product of query and key is multiplied by."""

    d: int
    s: int
    window: tuple[int, int] | None
    factor: float

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.d // BLOCK)

    @property
    def lanes(self) -> int:
        """Lanes of vectors that no block's end cuts."""
        return vectors.vector_lanes(self.d)

    def sees(self, row: Expr, position: Expr, newest: Expr) -> Expr:
        """Return whether the token at `position` sees a cache row, in a cache written up to `newest`."""
        if self.window is None:
            return row <= position
        sinks, size = self.window
        ring = self.s - sinks
        # last: the ring's row of the newest position. Rows behind it are one turn older.
        last = T.truncmod(T.max(newest - sinks, 0), ring)
        held = newest - (last - (row - sinks)) - T.Select(row - sinks > last, ring, 0)
        # A row that holds a position below `sinks` was never written in the ring.
        # Positions up to position - size are outside the window.
        recent = T.And(T.And(held >= sinks, held > position - size), held <= position)
        return T.Or(T.And(row < sinks, row <= position), T.And(row >= sinks, recent))


def row_buffers(shape: ExactShape) -> Any:
    """Allocate the temporaries of one query row."""
    held, n = tiles_of(shape.s) * BLOCK, shape.blocks
    return script.temporaries(
        # One logit and one numerator per cached row, rounded up to whole tiles of 32 rows.
        logits=(held, "float32"),
        weights=(held, "int32"),
        # One tile of rows: numerators times powers of two, and these as a wide block with its exponent.
        scaled=(BLOCK, "float32"),
        integers=(BLOCK + 1, "int32"),
        # The sums of a block of columns, and of a logit.
        acc=(BLOCK, "int32"),
        total=(1, "float32"),
        # stat: the maximum of the logits, and the inverse of the sum.
        # count: the sum of the numerators, exact in int64.
        stat=(2, "float32"),
        count=(1, "int64"),
        # out: the weighted values in whole blocks. columns: 1 where a block of columns is NaN.
        out=(n * BLOCK, "float32"),
        columns=(n, "int32"),
        # 16 numerators: their exponents in base 2, what the table has around them, and the numerators.
        units=(LANES, "int32"),
        low=(LANES, "int32"),
        high=(LANES, "int32"),
        power=(LANES, "int32"),
    )


def wide_exponent(bits: Expr, lanes: int = 1) -> Expr:
    """Return the exponent of a wide block whose largest magnitude has these bits."""
    # The carry is where the largest mantissa would round up to 2^14.
    return T.max(exponent_of(bits, exact.WIDE_BITS, lanes), broadcast(T.int32(LEAST_EXPONENT), lanes))


def not_a_number() -> Expr:
    return T.reinterpret("float32", T.int32(NOT_A_NUMBER))


# Exact attention: the query in wide blocks, and its logits with the rows of an int8 cache.


MINUS_INFINITY = -0x800000
"""The bits of minus infinity, as TVM takes no such literal."""


@script.inlined
def _round_query(shape, o, query):
    """Round the query's row to wide blocks."""
    top = T.alloc_buffer((1,), "int32")
    query.unknown[0] = 0
    # Scalar, because the query is rounded once for all cached rows.
    for e in range(shape.blocks):
        top[0] = 0
        for c in range(T.min(BLOCK, shape.d - e * BLOCK)):
            top[0] = T.max(top[0], magnitude_bits(o.q[o.at[0], o.at[1], o.at[3], e * BLOCK + c], 1))
        # Magnitude bits above infinity's are a NaN.
        query.unknown[0] = T.max(query.unknown[0], T.Cast("int32", top[0] > T.int32(INFINITY)))
        query.exponents[e] = wide_exponent(T.min(top[0], T.reinterpret("int32", T.float32(INT8_MAX))))
        for c in range(T.min(BLOCK, shape.d - e * BLOCK)):
            query.mantissas[e * BLOCK + c] = T.Cast(
                "int32",
                T.nearbyint(
                    bounded(o.q[o.at[0], o.at[1], o.at[3], e * BLOCK + c]) * power_of_two(0 - query.exponents[e])
                ),
            )


def _vectors_of(shape: ExactShape, e: Expr) -> Expr:
    """Return the vectors of a block. Whole blocks have a fixed number of them, which are unrolled."""
    return BLOCK // shape.lanes if shape.d % BLOCK == 0 else T.min(BLOCK, shape.d - e * BLOCK) // shape.lanes


def _total_of(acc: Any, lanes: int) -> Expr:
    return vectors.reduce_add(acc[ramp(0, lanes)], lanes) if lanes > 1 else acc[0]


@script.inlined
def _multiply_row(shape, lanes, loop, o, query, sums, j):
    sums.total[0] = T.float32(0)
    # e: blocks in order, whose sums are added in float32. c: vectors of a block, in registers.
    for e in T.unroll(shape.blocks):
        # 32 products of at most 2^14 * 2^7: a block's sum is at most 2^26, exact in int32. The cast rounds it once.
        sums.acc[ramp(0, lanes)] = broadcast(T.int32(0), lanes)
        for c in loop(_vectors_of(shape, e)):
            sums.acc[ramp(0, lanes)] = sums.acc[ramp(0, lanes)] + query.mantissas[
                ramp(e * BLOCK + c * lanes, lanes)
            ] * cast("int32", o.keys[o.at[4], o.at[2], j, ramp(e * BLOCK + c * lanes, lanes)], lanes)
        # The product's exponent is the sum of both, limited to those of normal powers of two.
        power: T.let = query.exponents[e] + T.Cast("int32", o.keys[o.at[4], o.at[2], j, shape.d + e])
        sums.total[0] = sums.total[0] + fence(
            "float32", T.Cast("float32", _total_of(sums.acc, lanes)) * power_of_two(T.max(T.min(power, 127), -126))
        )
        # A key's block with a NaN has zero mantissas, so its product does not show the NaN.
        if o.keys[o.at[4], o.at[2], j, shape.d + e] == T.int8(NAN_EXPONENT):
            query.unknown[0] = 1
    sums.logits[j] = sums.total[0] * T.float32(shape.factor)


@script.inlined
def _multiply_keys(shape, o, query, sums, rows, position, newest):
    """Write the logits, and their maximum to sums.stat[0].

    The logit of a row that is not seen is NaN, up to the end of the last tile. query.unknown[0] becomes 1 where that of
    one that is seen is NaN.
    """
    sums.stat[0] = T.reinterpret("float32", T.int32(MINUS_INFINITY))
    for j in range(tiles_of(rows) * BLOCK):
        # NaN marks a row that is not seen, and `weigh` turns it into UNSEEN.
        sums.logits[j] = not_a_number()
        if T.And(j < rows, shape.sees(j, position, newest)):
            _multiply_row(shape, shape.lanes, T.unroll if shape.d % BLOCK == 0 else T.serial, o, query, sums, j)
            if magnitude_bits(sums.logits[j], 1) > T.int32(INFINITY):  # TVM takes x != x for false
                query.unknown[0] = 1
            # T.max may lose a NaN. query.unknown[0] remembers it.
            sums.stat[0] = T.max(sums.stat[0], sums.logits[j])


# Exact attention: the numerators of the softmax, and the values of an int8 cache that they weigh.


def _knot(units: Expr, lanes: int = 1) -> Expr:
    # Bits 8 to 15 of the fraction choose one of 256 knots. The lower 8 bits interpolate behind it.
    return T.bitwise_and(
        T.shift_right(units, broadcast(T.int32(8), lanes)), broadcast(T.int32(exact.EXP_KNOTS - 1), lanes)
    )


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


@script.inlined
def numerators(read, table, sums, logits, most):
    """Write the numerators of 16 logits, UNSEEN where a logit is NaN, to sums.power."""
    # T.max gives its second operand where the first is a NaN.
    sums.units[ramp(0, LANES)] = cast(
        "int32",
        T.nearbyint(
            T.max(logits - most, T.Broadcast(T.float32(exact.EXP_LIMIT), LANES))
            * T.Broadcast(T.float32(1 << exact.EXP_INPUT_BITS), LANES)
        ),
        LANES,
    )
    read(table, sums.units, sums.low, sums.high, _knot)
    sums.power[ramp(0, LANES)] = T.Select(
        magnitude_bits(logits, LANES) <= T.Broadcast(T.int32(INFINITY), LANES),
        _power(sums.low[ramp(0, LANES)], sums.high[ramp(0, LANES)], sums.units[ramp(0, LANES)]),
        T.Broadcast(T.int32(UNSEEN), LANES),
    )


@script.inlined
def weigh(read, o, sums, rows):
    """Write the numerators of whole tiles, UNSEEN where the logit is NaN, and their sum to sums.count[0]."""
    sums.count[0] = T.int64(0)
    for part in range(tiles_of(rows) * (BLOCK // LANES)):
        numerators(read, o.table, sums, sums.logits[ramp(part * LANES, LANES)], T.Broadcast(sums.stat[0], LANES))
        sums.weights[ramp(part * LANES, LANES)] = sums.power[ramp(0, LANES)]
        # The maximum with 0 takes UNSEEN out of the sum. 16 numerators of at most 2^24 fit int32.
        sums.count[0] = sums.count[0] + T.Cast(
            "int64",
            vectors.reduce_add(T.max(sums.power[ramp(0, LANES)], T.Broadcast(T.int32(0), LANES)), LANES),
        )


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


@script.inlined
def _add_tile(d, lanes, whole, o, sums, start, count, e):
    sums.acc[whole] = T.Broadcast(T.int32(0), BLOCK)
    # j: rows of the tile. v: vectors of the block's columns, whose sums are in registers.
    # 32 products of at most 2^14 * 2^7 are exact in int32.
    for j in range(count):
        for v in T.unroll(BLOCK // lanes):
            # The last block of columns may be shorter than 32.
            if e * BLOCK + v * lanes < d:
                sums.acc[ramp(v * lanes, lanes)] = sums.acc[ramp(v * lanes, lanes)] + broadcast(
                    sums.integers[j], lanes
                ) * cast("int32", o.values[o.at[4], o.at[2], start + j, ramp(e * BLOCK + v * lanes, lanes)], lanes)
    # Tiles are added in float32 in the order of the cache. The fence rounds the product before the addition.
    sums.out[ramp(e * BLOCK, BLOCK)] = sums.out[ramp(e * BLOCK, BLOCK)] + fence(
        f"float32x{BLOCK}",
        cast("float32", sums.acc[whole], BLOCK) * T.Broadcast(power_of_two(sums.integers[BLOCK]), BLOCK),
    )


@script.inlined
def _add_values(shape, o, sums, rows):
    """Write the weighted values to sums.out, and 1 to sums.columns where a block of a row that is seen holds a NaN."""
    for e in range(shape.blocks):
        sums.columns[e] = 0
        sums.out[ramp(e * BLOCK, BLOCK)] = T.Broadcast(T.float32(0), BLOCK)
    # tile: 32 rows in the order of the memory. e: blocks of columns, each with an exponent of its own.
    for tile in range(tiles_of(rows)):
        for e in range(shape.blocks):
            count = T.meta_var(T.min(rows - tile * BLOCK, BLOCK))
            _scale_weights(shape.d, ramp(0, BLOCK), o, sums, tile * BLOCK, count, e)
            _add_tile(shape.d, shape.lanes, ramp(0, BLOCK), o, sums, tile * BLOCK, count, e)


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


@script.kernel
def exact_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    window: tuple[int, int] | None = None,
    positions: int = 1,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return attention of query rows [B, Hq, T, D] to the int8 rows [V, Hkv, S, .] that they see: float32 as query.

    `window` is (sinks, window) of a ring cache; None: all rows up to the query's. Parallel over heads and query rows.
    """
    # All instruction sets have the same integer lanes, in plain TIR; some gather from the table.
    read = read_knots(isa)
    b, hq, t, d = query
    videos, hkv, s, _ = cache
    share = b // videos
    shape = ExactShape(d, s, window, float(exact.logit_factor(scale)))
    n, size, knots = shape.blocks, d + shape.blocks, exact.EXP_KNOTS + 1
    items = b * hq * t
    loop = T.parallel if items > 1 and items * s * d >= PARALLEL_CACHE_ELEMENTS else T.serial

    @script.prim_func(private=True, s_tir=True)
    def attend_exact(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((videos, hkv, s, size), "int8"),
        values: T.Buffer((videos, hkv, s, size), "int8"),
        position: T.Buffer((positions,), "int64"),
        table: T.Buffer((knots,), "int32"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        for item in loop(items):
            with T.sblock("row"):
                script.access([q, keys, values, position, table], [y])
                sums = row_buffers(shape)
                # The query as a wide block, and 1 in `unknown` where it holds a NaN.
                own = script.temporaries(mantissas=(d, "int32"), exponents=(n, "int32"), unknown=(1, "int32"))
                bi: T.let = item // (hq * t)
                head: T.let = item // t % hq
                i: T.let = item % t
                last: T.let = T.Cast("int32", number_of(position, bi))
                first: T.let = T.max(last, 0)
                place: T.let = first + i
                newest: T.let = first + t - 1
                # A ring holds rows of any age, so all rows up to the newest one are scanned and `sees` decides.
                rows: T.let = T.min((place if window is None else newest) + 1, s)
                # at: batch row, query head, key/value head, query row, row set of the cache.
                at = T.meta_var((bi, head, head // (hq // hkv), i, bi // share))
                o = script.temporaries(q=q, keys=keys, values=values, position=position, table=table, at=at)
                _round_query(shape, o, own)
                _multiply_keys(shape, o, own, sums, rows, place, newest)
                weigh(read, o, sums, rows)
                _add_values(shape, o, sums, rows)
                sums.stat[1] = T.float32(1) / (T.Cast("float32", sums.count[0]) * T.float32(2.0**-exact.EXP_BITS))
                # A maximum that is not finite makes the whole row NaN.
                if magnitude_bits(sums.stat[0], 1) >= T.int32(INFINITY):
                    own.unknown[0] = 1
                # A NaN in a block of values makes the 32 columns of that block NaN, no others. A row that is not there
                # has position -1, and is zero.
                for c in range(d):
                    y[bi, head, i, c] = T.Select(
                        last < 0,
                        T.float32(0),
                        T.Select(
                            own.unknown[0] + sums.columns[c // BLOCK] > 0, not_a_number(), sums.out[c] * sums.stat[1]
                        ),
                    )

    return attend_exact
