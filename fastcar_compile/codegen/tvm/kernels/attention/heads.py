"""Sums across the lanes of 16 vectors of 16 float32 at once, in the order of `add_lanes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.softmax import KEY_BLOCK, AttendRows, LogitRule, Operands, Step
from fastcar_compile.codegen.tvm.kernels.cache import Row, RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.script import buffers, each, inlined, temporaries
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, PREFETCH_BYTES, Expr, exp_not_positive, fence, vector
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


def _pick(buffers: Sequence[Any], numbers: Sequence[int], lanes: Sequence[int]) -> Expr:
    """Return lanes of two vectors, which are the vectors of these numbers of two buffers."""
    return T.Shuffle([b[vector(n, LANES)] for b, n in zip(buffers, numbers, strict=True)], list(lanes))


def _folded(buffer: Any, numbers: Sequence[int], picks: _Picks) -> Expr:
    """Return the sum of both picks of two vectors of a buffer."""
    return _pick([buffer] * 2, numbers, picks[0]) + _pick([buffer] * 2, numbers, picks[1])


def _lane(mixed: Any, number: int) -> Expr:
    """Return lane `number` of every four lanes of the four vectors that were mixed."""
    return _pick([mixed] * 2, (number // 2, 2 + number // 2), _PAIRS[number % 2])


@inlined
def _fold(buffer, _number):
    """Add halves of the four vectors down to four lanes each: one vector."""
    # 16 lanes of a sum become 8, then 4. Every step joins two vectors into one, so no lane is idle.
    buffer[vector(0, LANES)] = _folded(buffer, (0, 1), _HALVES)
    buffer[vector(1, LANES)] = _folded(buffer, (2, 3), _HALVES)
    # After this step vector 0 holds four lanes of each of the buffer's four vectors, in the vectors' order.
    buffer[vector(0, LANES)] = _folded(buffer, (0, 1), _QUARTERS)


@inlined
def add_lanes_of_all(sums, mixed):
    """Write the sum of each vector's lanes to sums[0][0 .. 15]. The order is that of `add_lanes`, bit for bit.

    sums: four buffers float32 [4 * 16]. Vector j of buffer i becomes sum 4 * j + i. mixed: a temporary alike.
    """
    each(_fold, sums)
    # A 4 x 4 transpose in two rounds, in every four lanes: of the buffers in pairs here, of the pairs in `_lane`.
    # Then lane 4 j + i belongs to sum 4 j + i.
    mixed[vector(0, LANES)] = _pick(sums[:2], (0, 0), _SINGLES[0])
    mixed[vector(1, LANES)] = _pick(sums[:2], (0, 0), _SINGLES[1])
    mixed[vector(2, LANES)] = _pick(sums[2:], (0, 0), _SINGLES[0])
    mixed[vector(3, LANES)] = _pick(sums[2:], (0, 0), _SINGLES[1])
    # Lanes 0, 1, 2 and 3 are added in turn, because `add_lanes` does: another order rounds differently.
    sums[0][vector(0, LANES)] = ((_lane(mixed, 0) + _lane(mixed, 1)) + _lane(mixed, 2)) + _lane(mixed, 3)


# Query heads of a group meet float cached rows together on AVX-512, which has registers for all of their sums.
#
# Every sum is added in the order of `softmax.attend_rows`, so results are equal bit for bit. What differs is what the
# lanes of a vector hold: the 16 logits of a part are those of several heads and keys. So the sums across lanes and
# exp take one vector for 16 logits, and a value row is loaded once for all heads.


@dataclass(frozen=True)
class HeadTile:
    """`heads` query heads of a group share a pass over the rows."""

    heads: int
    rows_of: RowFormat

    @property
    def keys(self) -> int:
        """Keys of a part: its 16 logits are those of all heads with them, key after key."""
        return LANES // self.heads

    def query(self, o: Operands, step: Step, head: Expr) -> Row:
        """Return the query row of a head of the tile that begins at `step.g`."""
        return row_at(o.q, step.group.b, step.group.first + step.g + head, step.group.i)

    def of_lane(self, values: Any, start: Expr) -> Expr:
        """Return one value per head, in all lanes: lane i has that of head i modulo `heads`."""
        return T.Shuffle([values[T.Ramp(start, 1, self.heads)]] * self.keys, list(range(LANES)))


def heads_together(d: int, group: int, dtype: str, isa: InstructionSet) -> int:
    """Return how many heads share a pass: a vector's worth of accumulators at most; 1 where they cannot."""
    # A tile takes vectors of 16 lanes that cover D and elements without a block exponent.
    if isa.float_lanes != LANES or d % LANES or kv_type(dtype).block:
        return 1
    # n accumulators of d float32 are at most 256 sums: 16 of the 32 registers.
    return next((n for n in (4, 2) if group % n == 0 and n * d <= LANES * LANES), 1)


def attend_rows(d: int, group: int, rule: LogitRule, dtype: str, isa: InstructionSet) -> AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    tile = HeadTile(heads_together(d, group, dtype, isa), RowFormat(d, dtype, isa))
    heads, logits, weigh, add_values = tile.heads, _logits(tile, rule), _weigh(tile), _add_values(tile)

    @inlined
    def attend(o, heads_of, rows):
        # The 16 vectors of products stand in four buffers: one of 1024 bytes would not be on the stack.
        sums = buffers(4, 4 * LANES)
        # One accumulator per head of the tile.
        acc = buffers(heads, d)
        block = temporaries(
            mixed=(4 * LANES, "float32"),
            # Row after row: logits, then exp(logit - m), and 0 past the block's rows.
            weights=(KEY_BLOCK * heads, "float32"),
            # The running maximum, by lane modulo `heads`, and exp(old m - m) alike; the heads' normalisers.
            m=(LANES, "float32"),
            decay=(LANES, "float32"),
            l=(heads, "float32"),
        )
        # number: blocks of rows in order. g: tiles of heads, which find the block in the first-level cache.
        for number in range((rows.last - rows.first + KEY_BLOCK - 1) // KEY_BLOCK):
            for g in range(group // heads):
                count: T.let = T.min(rows.last - rows.first - number * KEY_BLOCK, KEY_BLOCK)
                start: T.let = rows.first + number * KEY_BLOCK
                logits(o, Step(heads_of, rows, g * heads, start, count), block, sums)
                weigh(o.state, Step(heads_of, rows, g * heads, start, count), block)
                add_values(o, Step(heads_of, rows, g * heads, start, count), block, acc)

    return AttendRows(PREFETCH_BYTES // tile.rows_of.bytes, attend, lambda column: column, d)


def _prefetch_rows(rows_of: RowFormat, count: int) -> Callable[..., None]:
    """Return the macro (cache, step, number): prefetches `count` rows for those from `number` of the block on."""
    lines = -(-count * rows_of.bytes // LINE)

    @inlined
    def prefetch_rows(cache, step, number):
        # Only the first tile of heads prefetches, and its rows are adjacent in the cache.
        if step.rows.ahead is not None and step.g == 0:
            for line in T.unroll(lines):
                T.evaluate(step.prefetch(cache, step.start + number, line * rows_of.elements_of(LINE)))

    return prefetch_rows


def _multiply(tile: HeadTile) -> Callable[..., None]:
    """Return the macro (o, step, number, sums): products of the tile with the keys from row `number` on, by lane."""
    rows_of, heads = tile.rows_of, tile.heads

    @inlined
    def clear(buffer, _i):
        for v in T.vectorized(LANES):
            for j in T.unroll(4):
                buffer[j * LANES + v] = T.float32(0)

    @inlined
    def add(o, step, number, c, buffer, i):
        # Vector j of buffer i is sum 4 j + i: head (4 j + i) % heads with key (4 j + i) // heads.
        for j in T.unroll(4):
            for v in T.vectorized(LANES):
                buffer[j * LANES + v] += tile.query(o, step, (4 * j + i) % heads)(c * LANES + v) * rows_of.element(
                    row_at(o.keys, *step.clamped(number + (4 * j + i) // heads)), c * LANES, v
                )

    @inlined
    def multiply(o, step, number, sums):
        each(clear, sums)
        # c: unrolled along the head. i, j: unrolled, the sums of all heads and keys, in registers. v: one vector.
        # 16 registers hold the sums, 16 remain for the loaded vectors.
        for c in T.unroll(rows_of.dim // LANES):
            each(add, sums, o, step, number, c)

    return multiply


def _logits(tile: HeadTile, rule: LogitRule) -> Callable[..., None]:
    """Return the macro (o, step, block, sums): the block's weights become logits, its m their maximum with m."""
    multiply, prefetch_rows = _multiply(tile), _prefetch_rows(tile.rows_of, tile.keys)
    keys, fold = tile.keys, _largest_of_keys(tile)

    @inlined
    def logits(o, step, block, sums):
        # m holds every head's maximum in all lanes of that head, so the maxima of a part need no shuffle.
        block.m[vector(0, LANES)] = tile.of_lane(o.state.m, step.slot)
        for part in range((step.count + keys - 1) // keys):
            prefetch_rows(o.keys, step, part * keys)
            multiply(o, step, part * keys, sums)
            add_lanes_of_all(sums, block.mixed)
            # The fence keeps LLVM from fusing the scale with the difference logit - m.
            block.weights[vector(part, LANES)] = fence(
                f"float32x{LANES}", sums[0][vector(0, LANES)] * T.Broadcast(T.float32(rule.scale), LANES)
            )
            if rule.softcap is not None:
                for v in T.vectorized(LANES):
                    block.weights[part * LANES + v] = rule.capped(block.weights[part * LANES + v])
            block.m[vector(0, LANES)] = T.max(block.weights[vector(part, LANES)], block.m[vector(0, LANES)])
        # So far lane i has the maximum over its own keys only.
        fold(block.m)

    return logits


def _largest_of_keys(tile: HeadTile) -> Callable[[Any], None]:
    """Return what writes each head's maximum to all of its lanes."""

    @inlined
    def fold(m, distance):
        # A butterfly: lane and lane ^ distance exchange maxima, so every lane of a head ends with the same one.
        m[vector(0, LANES)] = T.max(
            m[vector(0, LANES)], T.Shuffle([m[vector(0, LANES)]], [lane ^ distance for lane in range(LANES)])
        )

    def fold_all(m: Any) -> None:
        distance = tile.heads
        # Distances from `heads` on stay within the lanes of one head.
        while distance < LANES:
            fold(m, distance)
            distance *= 2

    return fold_all


def _weigh(tile: HeadTile) -> Callable[..., None]:
    """Return the macro (state, step, block): logits become weights, the running maximum of the slots is updated."""
    heads, keys = tile.heads, tile.keys

    def in_block(part: Expr, count: Expr) -> Expr:
        """Return which lanes of a part have a key of the block."""
        return T.Ramp(part * LANES, 1, LANES) < T.Broadcast(count * heads, LANES)

    @inlined
    def weigh(state, step, block):
        block.decay[vector(0, LANES)] = exp_not_positive(
            tile.of_lane(state.m, step.slot) - block.m[vector(0, LANES)], LANES
        )
        for g in T.unroll(heads):
            state.m[step.slot + g] = block.m[g]
        for part in range((step.count + keys - 1) // keys):
            block.weights[vector(part, LANES)] = T.Select(
                in_block(part, step.count),
                exp_not_positive(block.weights[vector(part, LANES)] - block.m[vector(0, LANES)], LANES),
                T.Broadcast(T.float32(0), LANES),
            )

    return weigh


def _add_values(tile: HeadTile) -> Callable[..., None]:
    """Return the macro (o, step, block, acc): l and acc of the slots are rescaled and get the block's rows."""
    rows_of, heads, d = tile.rows_of, tile.heads, tile.rows_of.dim
    prefetch_rows = _prefetch_rows(rows_of, 1)

    @inlined
    def begin(state, step, block, acc, g):
        for c in T.unroll(d // LANES):
            for v in T.vectorized(LANES):
                acc[c * LANES + v] = state.acc[step.slot + g, c * LANES + v] * block.decay[g]

    @inlined
    def add(o, step, r, weights, acc, g):
        for c in T.unroll(d // LANES):
            for v in T.vectorized(LANES):
                acc[c * LANES + v] += rows_of.weighted(
                    weights[r * heads + g], row_at(o.values, *step.index(r)), c * LANES, v
                )

    @inlined
    def end(state, step, acc, g):
        for c in T.unroll(d // LANES):
            for v in T.vectorized(LANES):
                state.acc[step.slot + g, c * LANES + v] = acc[c * LANES + v]

    @inlined
    def add_values(o, step, block, acc):
        for g in T.vectorized(heads):
            block.l[g] = o.state.l[step.slot + g] * block.decay[g]
        each(begin, acc, o.state, step, block)
        # r: rows of the block. All accumulators are in registers.
        # A row of values is loaded once for all heads, whose weights are broadcast.
        for r in range(step.count):
            prefetch_rows(o.values, step, r)
            # l is summed row by row, as `softmax.attend_rows` does: the bits are equal.
            for g in T.vectorized(heads):
                block.l[g] += block.weights[r * heads + g]
            each(add, acc, o, step, r, block.weights)
        for g in T.vectorized(heads):
            o.state.l[step.slot + g] = block.l[g]
        each(end, acc, o.state, step)

    return add_values
