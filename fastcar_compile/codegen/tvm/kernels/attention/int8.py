"""Weighted sums of the values of an int8 cache, from integer products.

The weights of a block of rows, times the powers of two of the rows' exponents, are rounded to 24 bits of the largest
one and split into three limbs. vpdpbusd adds four adjacent bytes. So four rows are interleaved bytewise first, and the
output columns stay permuted (`place`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.attention import query_limbs, softmax
from fastcar_compile.codegen.tvm.kernels.attention.query_limbs import LIMBS, SUMS, VECTOR_BYTES, two_halves, unit
from fastcar_compile.codegen.tvm.kernels.attention.softmax import DECAY, KEY_BLOCK, PARALLEL_KEYS, M, prefetch_rows
from fastcar_compile.codegen.tvm.kernels.cache import RowFormat
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, fold_fours, magnitude_bits, ramp, vector
from fastcar_compile.ir.ops.operator import BLOCK as EXPONENT_BLOCK

LARGEST = (1 << 24) - (1 << 8)
"""The largest integer of a weight, which has no sign. The rounded product with an inverse does not reach 2^24."""


def split_weights_buffers(d: int) -> Any:
    """Allocate what the mantissas of rows are multiplied by, for each exponent block of the columns."""
    lanes = lanes_for(d)
    return script.temporaries(
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
    return script.temporaries(
        interleaved=(4 * VECTOR_BYTES, "int8"),
        columns=(4 * VECTOR_BYTES, "int8"),
        # Low, middle and high. With 128 columns they are 24 of the 32 registers.
        limbs=script.buffers(LIMBS, columns_of(d), "int32"),
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


@script.inlined
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


@script.inlined
def _add_vector(number, weights, columns, quarter, total, k):
    # The weights' limb is the unsigned factor and mantissas are the signed one: no zero-point correction is needed.
    total[T.Ramp(number * SUMS, 1, SUMS)] = vectors.vpdpbusd(
        total[vector(number, SUMS)], weights(k), columns[T.Ramp(quarter * VECTOR_BYTES, 1, VECTOR_BYTES)], VECTOR_BYTES
    )


def _largest_of_rows(largest: Any, lanes: int, by: int) -> Expr:
    """Return the maxima of lanes that are `by` apart."""
    own = largest[vector(0, lanes)]
    return T.max(own, T.Shuffle([own], [lane ^ by for lane in range(lanes)]))


def _limbs_of(whole: Expr, d: int) -> Expr:
    """Return integers by their limbs: byte k of those of four rows is one int32, which meets four interleaved rows."""
    blocks, rows = range(columns_of(d) // EXPONENT_BLOCK), range(PARALLEL_KEYS)
    order = [(e * PARALLEL_KEYS + r) * 4 + k for e in blocks for k in range(4) for r in rows]
    return T.reinterpret(f"int32x{lanes_for(d)}", T.Shuffle([T.reinterpret(f"int8x{len(order)}", whole)], order))


def _weighted_scales(values: Any, d: int, step: softmax.Step, start: Expr, weights: Any, part: Expr) -> Expr:
    """Return weight times 2^exponent: lane 4 e + r is row r of four with exponent block e."""
    # Loads have all blocks of a row together.
    blocks = columns_of(d) // EXPONENT_BLOCK
    order = [r * blocks + e for e in range(blocks) for r in range(PARALLEL_KEYS)]
    scales = query_limbs.block_scales(values, step.four_rows(part), start, blocks, order)
    return scales * T.Shuffle([weights[vector(part, PARALLEL_KEYS)]] * blocks, list(range(lanes_for(d))))


@script.inlined
def _scale_weights(d, lanes, o, step, start, weights, split):
    split.largest[vector(0, lanes)] = T.Broadcast(0, lanes)
    # part: four rows. Rows past the block's end have weight 0.
    for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
        split.exact[vector(part, lanes)] = _weighted_scales(o.values, d, step, start, weights, part)
        split.largest[vector(0, lanes)] = T.max(
            split.largest[vector(0, lanes)], magnitude_bits(split.exact[vector(part, lanes)], lanes)
        )
    # The maximum over the four rows of a block.
    split.largest[vector(0, lanes)] = _largest_of_rows(split.largest, lanes, 1)
    split.largest[vector(0, lanes)] = _largest_of_rows(split.largest, lanes, 2)


@script.inlined
def _split_weights(d, lanes, o, step, start, weights, split):
    """Split a block's weights for the exponents from `start` on."""
    _scale_weights(d, lanes, o, step, start, weights, split)
    for v in T.vectorized(lanes):
        split.unit[v] = T.max(T.float32(query_limbs.SMALLEST), T.reinterpret("float32", split.largest[v]))
    # Integers are below 2^24, so the fourth byte is 0 and the first three are the limbs.
    for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
        split.limbs[vector(part, lanes)] = _limbs_of(
            T.Cast(
                f"int32x{lanes}",
                T.nearbyint(
                    split.exact[vector(part, lanes)]
                    * (T.Broadcast(T.float32(LARGEST), lanes) / split.unit[vector(0, lanes)])
                ),
            ),
            d,
        )
    for v in T.vectorized(lanes):
        split.unit[v] = unit(split.unit[v], LARGEST)


def _limb(split: Any, part: Any, chunk: Any, k: int) -> Expr:
    """Return limb k of four rows, int8x64: of an exponent block in the lower half, of the next one in the upper."""
    lanes = split.unit.shape[0]
    a, b = (split.limbs[part * lanes + (2 * chunk + e) * 4 + k] for e in (0, 1))
    return T.reinterpret(f"int8x{VECTOR_BYTES}", two_halves(a, b, SUMS))


def _total(sums: Any, number: Any) -> Expr:
    """Return a vector of sums as float32. Two limbs are exact, the third addition rounds."""
    low, middle, high = (s[vector(number, SUMS)] for s in sums.limbs)
    lower = T.Cast(f"float32x{SUMS}", query_limbs.shift_sums(middle, 8) + low)
    return T.Cast(f"float32x{SUMS}", high) * T.Broadcast(T.float32(1 << 16), SUMS) + lower


@script.inlined
def _clear(width, total, _k):
    for v in T.unroll(width // SUMS):
        total[T.Ramp(v * SUMS, 1, SUMS)] = T.Broadcast(0, SUMS)


@script.inlined
def _add_four_rows(width, o, step, part, piece, split, sums):
    # c: unrolled, 64 columns. v: unrolled, the vectors of four rows; the sums of all columns are in registers.
    for c in T.unroll(width // VECTOR_BYTES):
        _interleave_rows(o.values, step.four_rows(part), piece * width + c * VECTOR_BYTES, sums)
        for v in T.unroll(4):
            # Three limbs are three independent chains of vectors.vpdpbusd, which hide its latency.
            script.each(_add_vector, sums.limbs, 4 * c + v, partial(_limb, split, part, c), sums.columns, v)


@script.inlined
def _rescale(width, acc, step, decay, piece, split, sums):
    for c in T.unroll(width // VECTOR_BYTES):
        for v in T.unroll(4):
            # Lanes 0 to 7 are among columns 0 to 31, the first exponent block; lanes 8 to 15 are in the second.
            acc[step.slot, T.Ramp(piece * width + (4 * c + v) * SUMS, 1, SUMS)] = (
                acc[step.slot, T.Ramp(piece * width + (4 * c + v) * SUMS, 1, SUMS)] * T.Broadcast(decay, SUMS)
            ) + _total(sums, 4 * c + v) * two_halves(
                split.unit[2 * c * PARALLEL_KEYS], split.unit[(2 * c + 1) * PARALLEL_KEYS], SUMS
            )


@script.inlined
def _add_values(rows_of, width, o, step, block, split, sums):
    """Rescale acc of the slot and add the block's rows, `width` columns at a time."""
    # piece: the columns whose sums fit the registers. part: four rows at a time.
    for piece in range(rows_of.dim // width):
        # The weights meet the exponents of these columns only, because each block of columns has its own.
        first = T.meta_var(rows_of.dim + piece * (width // EXPONENT_BLOCK))
        _split_weights(rows_of.dim, lanes_for(rows_of.dim), o, step, first, block.weights, split)
        script.each(_clear, sums.limbs, width)
        for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
            # The first query head prefetches the whole rows with its first piece.
            prefetch_rows(rows_of, PARALLEL_KEYS, o.values, step, part * PARALLEL_KEYS, piece)
            _add_four_rows(width, o, step, part, piece, split, sums)
        _rescale(width, o.state.acc, step, block.stat[DECAY], piece, split, sums)


# A query meets an int8 cache in integers: AVX-512 VNNI multiplies 64 mantissas at once, and none is widened.


AHEAD = 2 * KEY_BLOCK
"""The prefetch distance in rows. Measured: 48 to 96 are alike, prefetching into the first-level cache is slower."""


def suits(d: int, dtype: str, isa: InstructionSet) -> bool:
    """Return whether rows of heads of d elements are whole vectors and the instruction set has AVX-512 VNNI."""
    return dtype == "int8" and d % VECTOR_BYTES == 0 and isa.int8 == "vnni512"


def attend_rows(d: int, group: int, rule: softmax.LogitRule, dtype: str, isa: InstructionSet) -> softmax.AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of int8."""
    rows_of = RowFormat(d, dtype, isa)

    @script.inlined
    def attend(o, heads, rows):
        block = softmax.block_buffers()
        # The split query of all heads, made once per call.
        query = query_limbs.split_query_buffers(d, group)
        sums = query_limbs.logit_buffers()
        integers = T.alloc_buffer((EXPONENT_BLOCK,), "int32")
        # Weights of a block times the rows' powers of two, and what they meet.
        weights = split_weights_buffers(d)
        columns = value_buffers(d)
        query_limbs.split_query(d, group, rule.scale, o, heads, query, sums, integers)
        softmax.for_blocks(
            heads, rows, group, 1, _attend_block, (rows_of, rule, o, block, query, sums, weights, columns)
        )

    return softmax.AttendRows(AHEAD, attend, place, 4)


@script.inlined
def _attend_block(rows_of, rule, o, block, query, sums, weights, columns, step):
    query_limbs.multiply_keys(rows_of, o, step, query, sums, block.weights)
    if rule.softcap is not None:
        for v in T.vectorized(KEY_BLOCK):
            block.weights[v] = rule.capped(block.weights[v])
    block.stat[M] = o.state.m[step.slot]
    # sums.m has four maxima of logits without the cap.
    # The cap rises with the logit, so the cap of a maximum is the maximum of the capped logits.
    for v in T.unroll(4):
        block.stat[M] = T.max(rule.capped(sums.m[v]), block.stat[M])
    softmax.weigh_block(o.state, step.slot, step.count, block)
    # l: 32 weights in four sums of eight, then in pairs. sums.m is free as a temporary here.
    sums.m[ramp(0, 4)] = fold_fours(vectors.load_from(block.weights, [], 0), KEY_BLOCK)
    o.state.l[step.slot] = o.state.l[step.slot] * block.stat[DECAY] + (
        (sums.m[0] + sums.m[1]) + (sums.m[2] + sums.m[3])
    )
    _add_values(rows_of, columns_of(rows_of.dim), o, step, block, weights, columns)
