"""Weighted sums of the values of an int8 cache, from integer products.

The weights of a block of rows, times the powers of two of the rows' exponents, are rounded to 24 bits of the largest
one and split into three limbs. vpdpbusd adds four adjacent bytes. So four rows are interleaved bytewise first, and the
output columns stay permuted (`place`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.query_limbs import (
    LIMBS,
    SMALLEST,
    SUMS,
    VECTOR_BYTES,
    block_scales,
    logit_buffers,
    multiply_keys,
    shift_sums,
    split_query,
    split_query_buffers,
    two_halves,
    unit,
)
from fastcar_compile.codegen.tvm.kernels.attention.softmax import (
    DECAY,
    KEY_BLOCK,
    PARALLEL_KEYS,
    AttendRows,
    LogitRule,
    M,
    Step,
    block_buffers,
    weigh_block,
)
from fastcar_compile.codegen.tvm.kernels.script import buffers, each, inlined, temporaries
from fastcar_compile.codegen.tvm.kernels.vectors import (
    LINE,
    Expr,
    fold_fours,
    load_from,
    magnitude_bits,
    ramp,
    vector,
    vpdpbusd,
)
from fastcar_compile.ir.ops.operator import BLOCK as EXPONENT_BLOCK

LARGEST = (1 << 24) - (1 << 8)
"""The largest integer of a weight, which has no sign. The rounded product with an inverse does not reach 2^24."""


def split_weights_buffers(d: int) -> Any:
    """Allocate what the mantissas of rows are multiplied by, for each exponent block of the columns."""
    lanes = lanes_for(d)
    return temporaries(
        # Four rows at a time: in each row a block after the other.
        exact=(KEY_BLOCK // PARALLEL_KEYS * lanes, "float32"),
        # Alike: the lowest limbs of four rows' integers, then the higher ones. The fourth limb is 0.
        limbs=(KEY_BLOCK // PARALLEL_KEYS * lanes, "int32"),
        # The bits of the largest magnitude; that magnitude, then the value of the integer 1.
        largest=(lanes, "int32"),
        unit=(lanes, "float32"),
    )


def value_buffers(d: int) -> Any:
    """Allocate four rows of values, interleaved bytewise in two steps, and sums by limb."""
    return temporaries(
        interleaved=(4 * VECTOR_BYTES, "int8"),
        columns=(4 * VECTOR_BYTES, "int8"),
        # Low, middle and high. With 128 columns they are 24 of the 32 registers.
        limbs=buffers(LIMBS, columns_of(d), "int32"),
    )


def columns_of(d: int) -> int:
    """Return the columns whose sums fit the registers."""
    return 2 * VECTOR_BYTES if d % (2 * VECTOR_BYTES) == 0 else VECTOR_BYTES


def lanes_for(d: int) -> int:
    """Return the weights of four rows, one per row and exponent block of those columns."""
    return PARALLEL_KEYS * columns_of(d) // EXPONENT_BLOCK


def place(column: Any) -> Any:
    """Return where the first of four columns is in an accumulator.

    Of 64 columns, vector i holds the quads i of the four lanes of 16 bytes.
    """
    # Unpack instructions work within 16 bytes, so vector i has the quads i of four lanes of 16 bytes.
    rest = column % VECTOR_BYTES
    return column - rest + rest % 16 // 4 * 16 + rest // 16 * 4


def _interleave(a: Expr, b: Expr, half: int, run: int) -> Expr:
    """Return, in every 16 bytes, runs of the lower or upper half of a and b in turn (vpunpckl, vpunpckh)."""
    order = [
        which * VECTOR_BYTES + lane + 8 * half + start + byte
        for lane in range(0, VECTOR_BYTES, 16)
        for start in range(0, 8, run)
        for which in (0, 1)
        for byte in range(run)
    ]
    return T.Shuffle([a, b], order)


def _of_two_rows(cache: Any, rows: Sequence[Any], start: Expr, half: int) -> Expr:
    a, b = (cache[(*row, T.Ramp(start, 1, VECTOR_BYTES))] for row in rows)
    return _interleave(a, b, half, 1)


def _of_four_rows(interleaved: Any, half: int, quarter: int) -> Expr:
    a, b = (interleaved[vector(2 * p + half, VECTOR_BYTES)] for p in (0, 1))
    return _interleave(a, b, quarter, 2)


@inlined
def _interleave_rows(values, rows, start, sums):
    """Write 64 columns of four rows from `start` on to sums.columns: four vectors, in each int32 lane one column."""
    # First bytes of two rows in turn, then pairs of bytes: an int32 lane ends as one column of four rows.
    sums.interleaved[vector(0, VECTOR_BYTES)] = _of_two_rows(values, rows[:2], start, 0)
    sums.interleaved[vector(1, VECTOR_BYTES)] = _of_two_rows(values, rows[:2], start, 1)
    sums.interleaved[vector(2, VECTOR_BYTES)] = _of_two_rows(values, rows[2:], start, 0)
    sums.interleaved[vector(3, VECTOR_BYTES)] = _of_two_rows(values, rows[2:], start, 1)
    # Half h and quarter q give vector 2 h + q: quad 2 h + q of every 16 columns.
    sums.columns[vector(0, VECTOR_BYTES)] = _of_four_rows(sums.interleaved, 0, 0)
    sums.columns[vector(1, VECTOR_BYTES)] = _of_four_rows(sums.interleaved, 0, 1)
    sums.columns[vector(2, VECTOR_BYTES)] = _of_four_rows(sums.interleaved, 1, 0)
    sums.columns[vector(3, VECTOR_BYTES)] = _of_four_rows(sums.interleaved, 1, 1)


@inlined
def _add_vector(number, weights, columns, quarter, total, k):
    # The weights' limb is the unsigned factor and mantissas are the signed one: no zero-point correction is needed.
    total[T.Ramp(number * SUMS, 1, SUMS)] = vpdpbusd(
        total[vector(number, SUMS)], weights(k), columns[T.Ramp(quarter * VECTOR_BYTES, 1, VECTOR_BYTES)], VECTOR_BYTES
    )


def _split_weights(d: int) -> Callable[..., None]:
    """Return the macro (o, step, start, weights, split): a block's weights for the exponents from `start` on."""
    blocks, lanes = columns_of(d) // EXPONENT_BLOCK, lanes_for(d)
    # Lane 4 e + r is row r with exponent block e, where loads have all blocks of a row together.
    of_blocks = [r * blocks + e for e in range(blocks) for r in range(PARALLEL_KEYS)]
    # Byte k of the integers of four rows become one int32: limb k, which meets four interleaved rows.
    of_limbs = [(e * PARALLEL_KEYS + r) * 4 + k for e in range(blocks) for k in range(4) for r in range(PARALLEL_KEYS)]
    neighbours = [[lane ^ by for lane in range(lanes)] for by in (1, 2)]

    def largest_of(largest: Any, by: int) -> Expr:
        own = largest[vector(0, lanes)]
        return T.max(own, T.Shuffle([own], neighbours[by]))

    def limbs_of(whole: Expr) -> Expr:
        return T.reinterpret(f"int32x{lanes}", T.Shuffle([T.reinterpret(f"int8x{4 * lanes}", whole)], of_limbs))

    @inlined
    def scale_weights(o, step, start, weights, split):
        split.largest[vector(0, lanes)] = T.Broadcast(0, lanes)
        # part: four rows. Rows past the block's end have weight 0.
        for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
            split.exact[vector(part, lanes)] = block_scales(
                o.values, step.four_rows(part), start, blocks, of_blocks
            ) * T.Shuffle([weights[vector(part, PARALLEL_KEYS)]] * blocks, list(range(lanes)))
            split.largest[vector(0, lanes)] = T.max(
                split.largest[vector(0, lanes)], magnitude_bits(split.exact[vector(part, lanes)], lanes)
            )
        # The maximum over the four rows of a block.
        split.largest[vector(0, lanes)] = largest_of(split.largest, 0)
        split.largest[vector(0, lanes)] = largest_of(split.largest, 1)

    @inlined
    def split_weights(o, step, start, weights, split):
        scale_weights(o, step, start, weights, split)
        for v in T.vectorized(lanes):
            split.unit[v] = T.max(T.float32(SMALLEST), T.reinterpret("float32", split.largest[v]))
        # Integers are below 2^24, so the fourth byte is 0 and the first three are the limbs.
        for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
            split.limbs[vector(part, lanes)] = limbs_of(
                T.Cast(
                    f"int32x{lanes}",
                    T.nearbyint(
                        split.exact[vector(part, lanes)]
                        * (T.Broadcast(T.float32(LARGEST), lanes) / split.unit[vector(0, lanes)])
                    ),
                )
            )
        for v in T.vectorized(lanes):
            split.unit[v] = unit(split.unit[v], LARGEST)

    return split_weights


def add_values(d: int) -> Callable[..., None]:
    """Return the macro (o, step, block, split, sums): acc of the slot is rescaled and gets the block's rows."""
    width, lanes, lines = columns_of(d), lanes_for(d), -(-PARALLEL_KEYS * (d + d // EXPONENT_BLOCK) // LINE)
    split_weights = _split_weights(d)

    def limb(split: Any, part: Any, chunk: Any, k: int) -> Expr:
        """Return limb k of four rows, int8x64: of an exponent block in the lower half, of the next one in the upper."""
        a, b = (split.limbs[part * lanes + (2 * chunk + e) * 4 + k] for e in (0, 1))
        return T.reinterpret(f"int8x{VECTOR_BYTES}", two_halves(a, b, SUMS))

    def total(sums: Any, number: Any) -> Expr:
        """Return a vector of sums as float32. Two limbs are exact, the third addition rounds."""
        low, middle, high = (s[vector(number, SUMS)] for s in sums.limbs)
        lower = T.Cast(f"float32x{SUMS}", shift_sums(middle, 8) + low)
        return T.Cast(f"float32x{SUMS}", high) * T.Broadcast(T.float32(1 << 16), SUMS) + lower

    @inlined
    def clear(total, _k):
        for v in T.unroll(width // SUMS):
            total[T.Ramp(v * SUMS, 1, SUMS)] = T.Broadcast(0, SUMS)

    @inlined
    def add_four_rows(o, step, part, piece, split, sums):
        # c: unrolled, 64 columns. v: unrolled, the vectors of four rows; the sums of all columns are in registers.
        for c in T.unroll(width // VECTOR_BYTES):
            _interleave_rows(o.values, step.four_rows(part), piece * width + c * VECTOR_BYTES, sums)
            for v in T.unroll(4):
                # Three limbs are three independent chains of vpdpbusd, which hide its latency.
                each(_add_vector, sums.limbs, 4 * c + v, partial(limb, split, part, c), sums.columns, v)

    @inlined
    def rescale(acc, step, decay, piece, split, sums):
        for c in T.unroll(width // VECTOR_BYTES):
            for v in T.unroll(4):
                # Lanes 0 to 7 are among columns 0 to 31, the first exponent block; lanes 8 to 15 are in the second.
                acc[step.slot, T.Ramp(piece * width + (4 * c + v) * SUMS, 1, SUMS)] = (
                    acc[step.slot, T.Ramp(piece * width + (4 * c + v) * SUMS, 1, SUMS)] * T.Broadcast(decay, SUMS)
                ) + total(sums, 4 * c + v) * two_halves(
                    split.unit[2 * c * PARALLEL_KEYS], split.unit[(2 * c + 1) * PARALLEL_KEYS], SUMS
                )

    @inlined
    def add(o, step, block, split, sums):
        # piece: the columns whose sums fit the registers. part: four rows at a time.
        for piece in range(d // width):
            # The weights meet the exponents of these columns only, because each block of columns has its own.
            split_weights(o, step, d + piece * (width // EXPONENT_BLOCK), block.weights, split)
            each(clear, sums.limbs)
            for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
                # The first query head prefetches the whole rows with its first piece.
                if step.rows.ahead is not None and step.g + piece == 0:
                    for line in T.unroll(lines):
                        T.evaluate(step.prefetch(o.values, step.start + part * PARALLEL_KEYS, line * LINE))
                add_four_rows(o, step, part, piece, split, sums)
            rescale(o.state.acc, step, block.stat[DECAY], piece, split, sums)

    return add


# A query meets an int8 cache in integers: AVX-512 VNNI multiplies 64 mantissas at once, and none is widened.


AHEAD = 2 * KEY_BLOCK
"""The prefetch distance in rows. Measured: 48 to 96 are alike, prefetching into the first-level cache is slower."""


def suits(d: int, dtype: str, isa: InstructionSet) -> bool:
    """Return whether rows of heads of d elements are whole vectors and the instruction set has AVX-512 VNNI."""
    return dtype == "int8" and d % VECTOR_BYTES == 0 and isa.int8 == "vnni512"


def attend_rows(d: int, group: int, rule: LogitRule, _dtype: str, _isa: InstructionSet) -> AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of int8."""
    split, logits, add = split_query(d, group, rule.scale), multiply_keys(d), add_values(d)

    @inlined
    def add_block(o, step, block, query, sums, values):
        logits(o, step, query, sums, block.weights)
        if rule.softcap is not None:
            for v in T.vectorized(KEY_BLOCK):
                block.weights[v] = rule.capped(block.weights[v])
        block.stat[M] = o.state.m[step.slot]
        # sums.m has four maxima of logits without the cap.
        # The cap rises with the logit, so the cap of a maximum is the maximum of the capped logits.
        for v in T.unroll(4):
            block.stat[M] = T.max(rule.capped(sums.m[v]), block.stat[M])
        weigh_block(o.state, step.slot, step.count, block)
        # l: 32 weights in four sums of eight, then in pairs. sums.m is free as a temporary here.
        sums.m[ramp(0, 4)] = fold_fours(load_from(block.weights, [], 0), KEY_BLOCK)
        o.state.l[step.slot] = o.state.l[step.slot] * block.stat[DECAY] + (
            (sums.m[0] + sums.m[1]) + (sums.m[2] + sums.m[3])
        )
        add(o, step, block, *values)

    @inlined
    def attend(o, heads, rows):
        block = block_buffers()
        # The split query of all heads, made once per call.
        query = split_query_buffers(d, group)
        sums = logit_buffers()
        integers = T.alloc_buffer((EXPONENT_BLOCK,), "int32")
        # Weights of a block times the rows' powers of two, and what they meet.
        weights = split_weights_buffers(d)
        columns = value_buffers(d)
        split(o, heads, query, sums, integers)
        # number: blocks of rows in order. g: query heads, which find the block in the first-level cache.
        for number in range((rows.last - rows.first + KEY_BLOCK - 1) // KEY_BLOCK):
            for g in range(group):
                count: T.let = T.min(rows.last - rows.first - number * KEY_BLOCK, KEY_BLOCK)
                start: T.let = rows.first + number * KEY_BLOCK
                add_block(o, Step(heads, rows, g, start, count), block, query, sums, (weights, columns))

    return AttendRows(AHEAD, attend, place, 4)
