"""Sums across the lanes of 16 vectors of 16 float32 at once, in the order of `add_lanes`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.attention import softmax
from fastcar_compile.codegen.tvm.kernels.cache import RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.vectors import PREFETCH_BYTES, Expr, exp_not_positive, fence, vector
from fastcar_compile.config.formats import kv_type

LANES = 16

_Picks = tuple[Sequence[int], Sequence[int]]

_HALVES: _Picks = ([*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)])
"""Lanes of two vectors: both lower halves, both upper halves."""

_QUARTERS: _Picks = (
    [8 * q + lane for q in range(4) for lane in range(4)],
    [8 * q + 4 + lane for q in range(4) for lane in range(4)],
)
"""Four lanes of every eight: the lower, the upper ones."""

_SINGLES: _Picks = (
    [4 * q + lane + of for q in range(4) for lane in (0, 1) for of in (0, LANES)],
    [4 * q + lane + of for q in range(4) for lane in (2, 3) for of in (0, LANES)],
)
"""Lower or upper two of every four lanes, of the two vectors in turn (vunpcklps, vunpckhps)."""

_PAIRS: _Picks = (
    [4 * q + lane + of for q in range(4) for of in (0, LANES) for lane in (0, 1)],
    [4 * q + lane + of for q in range(4) for of in (0, LANES) for lane in (2, 3)],
)
"""Lower or upper two of every four lanes, as pairs (vunpcklpd, vunpckhpd)."""


def _pick(two: Sequence[Any], numbers: Sequence[int], lanes: Sequence[int]) -> Expr:
    """Return lanes of two vectors, which are the vectors of these numbers of two buffers."""
    return T.Shuffle([b[vector(n, LANES)] for b, n in zip(two, numbers, strict=True)], list(lanes))


def _folded(buffer: Any, numbers: Sequence[int], picks: _Picks) -> Expr:
    """Return the sum of both picks of two vectors of a buffer."""
    return _pick([buffer] * 2, numbers, picks[0]) + _pick([buffer] * 2, numbers, picks[1])


def _lane(mixed: Any, number: int) -> Expr:
    """Return lane `number` of every four lanes of the four vectors that were mixed."""
    return _pick([mixed] * 2, (number // 2, 2 + number // 2), _PAIRS[number % 2])


@script.inlined
def _fold(buffer, _number):
    """Add halves of the four vectors down to four lanes each: one vector."""
    # 16 lanes of a sum become 8, then 4. Every step joins two vectors into one, so no lane is idle.
    buffer[vector(0, LANES)] = _folded(buffer, (0, 1), _HALVES)
    buffer[vector(1, LANES)] = _folded(buffer, (2, 3), _HALVES)
    # After this step vector 0 holds four lanes of each of the buffer's four vectors, in the vectors' order.
    buffer[vector(0, LANES)] = _folded(buffer, (0, 1), _QUARTERS)


@script.inlined
def add_lanes_of_all(sums, mixed):
    """Write the sum of each vector's lanes to sums[0][0 .. 15]. The order is that of `add_lanes`, bit for bit.

    sums: four buffers float32 [4 * 16]. Vector j of buffer i becomes sum 4 * j + i. mixed: a temporary alike.
    """
    script.each(_fold, sums)
    # A 4 x 4 transpose in two rounds, in every four lanes: of the buffers in pairs here, of the pairs in `_lane`.
    # Then lane 4 j + i belongs to sum 4 j + i.
    mixed[vector(0, LANES)] = _pick(sums[:2], (0, 0), _SINGLES[0])
    mixed[vector(1, LANES)] = _pick(sums[:2], (0, 0), _SINGLES[1])
    mixed[vector(2, LANES)] = _pick(sums[2:], (0, 0), _SINGLES[0])
    mixed[vector(3, LANES)] = _pick(sums[2:], (0, 0), _SINGLES[1])
    # Lanes 0, 1, 2 and 3 are added in turn, because `add_lanes` does: another order rounds differently.
    sums[0][vector(0, LANES)] = ((_lane(mixed, 0) + _lane(mixed, 1)) + _lane(mixed, 2)) + _lane(mixed, 3)


# Query heads of a group meet cached rows together on AVX-512, which has registers for all of their sums.
#
# Every sum is added in the order of `softmax.attend_rows`; with float caches results are equal bit for bit. What
# differs is what the lanes of a vector hold: the 16 logits of a part are those of several heads and keys. So the sums
# across lanes and exp take one vector for 16 logits, and a value row is loaded and widened once for all heads.


@dataclass(frozen=True)
class HeadTile:
    """`heads` query heads of a group share a pass over the rows."""

    heads: int
    rows_of: RowFormat
    rule: softmax.LogitRule

    @property
    def keys(self) -> int:
        """Keys of a part: its 16 logits are those of all heads with them, key after key."""
        return LANES // self.heads

    def of_lane(self, values: Any, start: Expr) -> Expr:
        """Return one value per head, in all lanes: lane i has that of head i modulo `heads`."""
        return T.Shuffle([values[T.Ramp(start, 1, self.heads)]] * self.keys, list(range(LANES)))


def heads_together(d: int, group: int, dtype: str, isa: InstructionSet) -> int:
    """Return how many heads share a pass: a vector's worth of accumulators at most; 1 where they cannot."""
    # Vectors of 16 lanes cover D, and each has one exponent.
    if isa.float_lanes != LANES or d % max(LANES, kv_type(dtype).block or 0):
        return 1
    # n accumulators of d float32 are at most 256 sums: 16 of the 32 registers.
    return next((n for n in (4, 2) if group % n == 0 and n * d <= LANES * LANES), 1)


def attend_rows(d: int, group: int, rule: softmax.LogitRule, dtype: str, isa: InstructionSet) -> softmax.AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    tile = HeadTile(heads_together(d, group, dtype, isa), RowFormat(d, dtype, isa), rule)

    @script.inlined
    def attend(o, heads_of, rows):
        # The 16 vectors of products stand in four buffers: one of 1024 bytes would not be on the stack.
        sums = script.buffers(4, 4 * LANES)
        # One accumulator per head of the tile.
        acc = script.buffers(tile.heads, d)
        block = script.temporaries(
            mixed=(4 * LANES, "float32"),
            # Row after row: logits, then exp(logit - m), and 0 past the block's rows.
            weights=(softmax.KEY_BLOCK * tile.heads, "float32"),
            # The running maximum, by lane modulo `heads`, and exp(old m - m) alike; the heads' normalisers.
            m=(LANES, "float32"),
            decay=(LANES, "float32"),
            l=(tile.heads, "float32"),
        )
        softmax.for_blocks(heads_of, rows, group, tile.heads, _attend_block, (tile, o, block, sums, acc))

    return softmax.AttendRows(PREFETCH_BYTES // tile.rows_of.bytes, attend)


@script.inlined
def _attend_block(tile, o, block, sums, acc, step):
    _logits(tile, o, step, block, sums)
    _weigh(tile, o.state, step, block)
    _add_values(tile, o, step, block, acc)


@script.inlined
def _clear(buffer, _i):
    for v in T.vectorized(LANES):
        for j in T.unroll(4):
            buffer[j * LANES + v] = T.float32(0)


@script.inlined
def _add_products(tile, o, step, number, c, buffer, i):
    # Vector j of buffer i is sum 4 j + i: head (4 j + i) % heads with key (4 j + i) // heads.
    for j in T.unroll(4):
        for v in T.vectorized(LANES):
            buffer[j * LANES + v] += step.query(o.q, (4 * j + i) % tile.heads)(c * LANES + v) * tile.rows_of.element(
                row_at(o.keys, *step.clamped(number + (4 * j + i) // tile.heads)), c * LANES, v
            )


@script.inlined
def _logits(tile, o, step, block, sums):
    """Turn the block's weights into logits, and its m into their maximum with m."""
    # m holds every head's maximum in all lanes of that head, so the maxima of a part need no shuffle.
    block.m[vector(0, LANES)] = tile.of_lane(o.state.m, step.slot)
    for part in range((step.count + tile.keys - 1) // tile.keys):
        softmax.prefetch_rows(tile.rows_of, tile.keys, o.keys, step, part * tile.keys, 0)
        script.each(_clear, sums)
        # c: unrolled along the head. i, j: unrolled, the sums of all heads and keys, in registers. v: one vector.
        # 16 registers hold the sums, 16 remain for the loaded vectors.
        for c in T.unroll(tile.rows_of.dim // LANES):
            script.each(_add_products, sums, tile, o, step, part * tile.keys, c)
        add_lanes_of_all(sums, block.mixed)
        # The fence keeps LLVM from fusing the scale with the difference logit - m.
        block.weights[vector(part, LANES)] = fence(
            f"float32x{LANES}", sums[0][vector(0, LANES)] * T.Broadcast(T.float32(tile.rule.scale), LANES)
        )
        if tile.rule.softcap is not None:
            for v in T.vectorized(LANES):
                block.weights[part * LANES + v] = tile.rule.capped(block.weights[part * LANES + v])
        block.m[vector(0, LANES)] = T.max(block.weights[vector(part, LANES)], block.m[vector(0, LANES)])
    # So far lane i has the maximum over its own keys only.
    # A butterfly: lane and lane ^ distance exchange maxima, so every lane of a head ends with the same one.
    # Distances from `heads` on stay within the lanes of one head.
    script.each(_exchange_maxima, [n for n in (1, 2, 4, 8) if n >= tile.heads], block.m)


@script.inlined
def _exchange_maxima(m, distance, _number):
    m[vector(0, LANES)] = T.max(
        m[vector(0, LANES)], T.Shuffle([m[vector(0, LANES)]], [lane ^ distance for lane in range(LANES)])
    )


def _in_block(tile: HeadTile, part: Expr, count: Expr) -> Expr:
    """Return which lanes of a part have a key of the block."""
    return T.Ramp(part * LANES, 1, LANES) < T.Broadcast(count * tile.heads, LANES)


@script.inlined
def _weigh(tile, state, step, block):
    """Turn logits into weights, and update the running maximum of the slots."""
    block.decay[vector(0, LANES)] = exp_not_positive(
        tile.of_lane(state.m, step.slot) - block.m[vector(0, LANES)], LANES
    )
    for g in T.unroll(tile.heads):
        state.m[step.slot + g] = block.m[g]
    for part in range((step.count + tile.keys - 1) // tile.keys):
        block.weights[vector(part, LANES)] = T.Select(
            _in_block(tile, part, step.count),
            exp_not_positive(block.weights[vector(part, LANES)] - block.m[vector(0, LANES)], LANES),
            T.Broadcast(T.float32(0), LANES),
        )


@script.inlined
def _begin(d, state, step, block, acc, g):
    for c in T.unroll(d // LANES):
        for v in T.vectorized(LANES):
            acc[c * LANES + v] = state.acc[step.slot + g, c * LANES + v] * block.decay[g]


@script.inlined
def _add_row(tile, o, step, r, weights, acc, g):
    for c in T.unroll(tile.rows_of.dim // LANES):
        for v in T.vectorized(LANES):
            acc[c * LANES + v] += weights[r * tile.heads + g] * tile.rows_of.element(
                row_at(o.values, *step.index(r)), c * LANES, v
            )


@script.inlined
def _end(d, state, step, acc, g):
    for c in T.unroll(d // LANES):
        for v in T.vectorized(LANES):
            state.acc[step.slot + g, c * LANES + v] = acc[c * LANES + v]


@script.inlined
def _add_values(tile, o, step, block, acc):
    """Rescale l and acc of the slots, and add the block's rows."""
    for g in T.vectorized(tile.heads):
        block.l[g] = o.state.l[step.slot + g] * block.decay[g]
    script.each(_begin, acc, tile.rows_of.dim, o.state, step, block)
    # r: rows of the block. All accumulators are in registers.
    # A row of values is loaded once for all heads, whose weights are broadcast.
    for r in range(step.count):
        softmax.prefetch_rows(tile.rows_of, 1, o.values, step, r, 0)
        # l is summed row by row, as `softmax.attend_rows` does: the bits are equal.
        for g in T.vectorized(tile.heads):
            block.l[g] += block.weights[r * tile.heads + g]
        script.each(_add_row, acc, tile, o, step, r, block.weights)
    for g in T.vectorized(tile.heads):
        o.state.l[step.slot + g] = block.l[g]
    script.each(_end, acc, tile.rows_of.dim, o.state, step)
