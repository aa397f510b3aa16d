"""From a product of query and key to its logit, to its weight, and to a sum of values: online softmax over blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.cache import Row, RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.script import inlined, temporaries
from fastcar_compile.codegen.tvm.kernels.vectors import (
    LINE,
    PREFETCH_BYTES,
    Expr,
    add_lanes,
    exp_not_positive,
    prefetch,
    tanh,
    vector_lanes,
)


@dataclass(frozen=True)
class LogitRule:
    """What a product of query and key becomes: times `scale`, and limited softly to `softcap` where there is one."""

    scale: float
    softcap: float | None = None

    def logit(self, product: Any) -> Any:
        """Return the logit of a product."""
        return self.capped(product * T.float32(self.scale))

    def capped(self, scaled: Any) -> Any:
        """Return softcap * tanh(scaled / softcap); without a soft-cap what is scaled."""
        if self.softcap is None:
            return scaled
        return T.float32(self.softcap) * tanh(scaled * T.float32(1 / self.softcap))


# Online softmax over blocks of cached rows: its state, its operands, and the step from logits to weights.
#
# The names are FlashAttention's: running maximum m, normaliser l, accumulator acc.


KEY_BLOCK = 32
"""Rows between two updates of the running maximum. Keys and values of one block stay in the first-level cache."""

PARALLEL_KEYS = 4
"""Keys whose dot products run together: independent sums that hide the latency of multiplications."""

LOWEST = -3.0e38
"""The running maximum before the first row."""


@dataclass(frozen=True)
class Operands:
    """q float32 [B, Hq, T, D], keys and values [B, Hkv, S, row size], and the state.

    The state has per slot m and l float32 [slots], acc float32 [slots, D]. l and acc are relative to exp(m).
    """

    q: Any
    keys: Any
    values: Any
    state: Any


@dataclass(frozen=True)
class Group:
    """Query heads from number `first` on, which share key/value head h: row i of batch row b.

    Their slots begin at `slot`.
    """

    b: Expr
    h: Expr
    first: Expr
    i: Expr
    slot: Expr


@dataclass(frozen=True)
class Rows:
    """The cached rows at(first) .. at(last - 1).

    Attributes:
        first, last: the range.
        at: number of a row in the range -> row of the cache.
        ahead: number of a row in the range -> row of the cache to prefetch while that row is read. None: no prefetch.
    """

    first: Expr
    last: Expr
    at: Callable[[Expr], Expr]
    ahead: Callable[[Expr], Expr] | None


@dataclass(frozen=True)
class Step:
    """Query head g of a group meets the block of `count` rows from number `start` on."""

    group: Group
    rows: Rows
    g: Expr
    start: Expr
    count: Expr

    @property
    def slot(self) -> Expr:
        """The slot of the query head."""
        return self.group.slot + self.g

    def index(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the cache index of the block's row of that number."""
        return self.group.b, self.group.h, self.rows.at(self.start + number)

    def clamped(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the same. The last row stands for those past the range."""
        return self.group.b, self.group.h, self.rows.at(T.min(self.start + number, self.rows.last - 1))

    def prefetch(self, cache: Any, row: Expr, element: Expr) -> Expr:
        """Return the prefetch of a line of the row that is read after row `row` of the range; it has one ahead."""
        assert self.rows.ahead is not None
        return prefetch(cache[self.group.b, self.group.h, self.rows.ahead(row), element])

    def four_rows(self, part: Expr) -> list[tuple[Expr, Expr, Expr]]:
        """Return the clamped indices of rows 4 * part .. 4 * part + 3."""
        return [self.clamped(part * PARALLEL_KEYS + r) for r in range(PARALLEL_KEYS)]


M, DECAY, L = 0, 1, 2
"""Elements of `stat` of a block."""


def block_buffers() -> Any:
    """Allocate the temporaries of a block.

    weights holds logits, then exp(logit - m), and 0 past the block's rows. stat[M] is the maximum with this block,
    stat[DECAY] is exp(old m - m), which rescales what was summed before, and stat[L] is the normaliser.
    """
    return temporaries(weights=(KEY_BLOCK, "float32"), stat=(3, "float32"))


@dataclass(frozen=True)
class AttendRows:
    """How a query meets cached rows of one type.

    Attributes:
        ahead: the prefetch distance in rows.
        attend: macro (Operands, Group, Rows) that adds the rows to the group's slots.
        place: column of the result -> where it is in a slot's accumulator, for the first of `run` columns in order.
        run: see `place`; divides the head dimension.
    """

    ahead: int
    attend: Callable[..., None]
    place: Callable[[Any], Any]
    run: int


@inlined
def weigh_block(state, slot, count, block):
    """Replace a block's logits by weights, update the running maximum of the slot, and set the block's decay."""
    # The running maximum never falls, so the argument is not positive.
    block.stat[DECAY] = exp_not_positive(state.m[slot] - block.stat[M])
    state.m[slot] = block.stat[M]
    # r: 32 weights, vectorised. A row past the block's end has a copy of a logit or an old one: its weight is 0.
    for r in T.vectorized(KEY_BLOCK):
        block.weights[r] = T.Select(r < count, exp_not_positive(block.weights[r] - block.stat[M]), T.float32(0))


# A query meets cached rows as float32: every element is widened where it is read.


def attend_rows(d: int, group: int, rule: LogitRule, dtype: str, isa: InstructionSet) -> AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    rows_of = RowFormat(d, dtype, isa)
    logits, add_values = _logits(rows_of, rule), _add_values(rows_of)
    lanes = vector_lanes(d)

    @inlined
    def attend(o, heads, rows):
        block = block_buffers()
        # dot: partial sums of four keys. acc: the accumulator of one query head. Both stay in registers in their loops.
        dot = T.alloc_buffer((PARALLEL_KEYS * lanes,), "float32")
        acc = T.alloc_buffer((d,), "float32")
        # number: blocks of rows in order. g: query heads, which find the block in the first-level cache.
        for number in range((rows.last - rows.first + KEY_BLOCK - 1) // KEY_BLOCK):
            for g in range(group):
                count: T.let = T.min(rows.last - rows.first - number * KEY_BLOCK, KEY_BLOCK)
                start: T.let = rows.first + number * KEY_BLOCK
                block.stat[M] = o.state.m[heads.slot + g]
                logits(o, Step(heads, rows, g, start, count), block, dot)
                weigh_block(o.state, heads.slot + g, count, block)
                add_values(o, Step(heads, rows, g, start, count), block, acc)

    return AttendRows(PREFETCH_BYTES // rows_of.bytes, attend, lambda column: column, d)


def _logits(rows_of: RowFormat, rule: LogitRule) -> Callable[..., None]:
    """Return the macro (o, step, block, dot): the block's weights become logits, its m their maximum with m."""
    lanes, lines = vector_lanes(rows_of.dim), -(-rows_of.bytes // LINE)
    # The vectors that share a block's exponent are one step: they are multiplied by its power of two together.
    stride = lanes * rows_of.vectors_of_block(lanes)

    def query(o: Operands, step: Step) -> Row:
        return row_at(o.q, step.group.b, step.group.first + step.g, step.group.i)

    @inlined
    def multiply(o, step, part, dot):
        # r: four keys at a time. c: unrolled along the head; dot is in registers. v: one vector.
        for r in T.unroll(PARALLEL_KEYS):
            for c in T.unroll(rows_of.dim // stride):
                for v in T.vectorized(lanes):
                    dot[r * lanes + v] += rows_of.product(
                        query(o, step), row_at(o.keys, *step.clamped(part * PARALLEL_KEYS + r)), c * stride, v, lanes
                    )

    @inlined
    def logits(o, step, block, dot):
        # part: four keys, of which those past the last row are the last row again. `weigh_block` makes their weights 0.
        for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
            for r in T.unroll(PARALLEL_KEYS):
                for v in T.vectorized(lanes):
                    dot[r * lanes + v] = T.float32(0)
            # Only the first query head prefetches: the others find the rows in the first-level cache.
            if step.rows.ahead is not None and step.g == 0:
                # r: unrolled, the lines of four rows, line r % lines of row r // lines.
                for r in T.unroll(PARALLEL_KEYS * lines):
                    T.evaluate(
                        step.prefetch(
                            o.keys,
                            step.start + part * PARALLEL_KEYS + r // lines,
                            r % lines * rows_of.elements_of(LINE),
                        )
                    )
            multiply(o, step, part, dot)
            # The sum across lanes has one order on every instruction set. `attend_heads` repeats it.
            for r in T.unroll(PARALLEL_KEYS):
                add_lanes(dot, r * lanes, lanes)
                block.weights[part * PARALLEL_KEYS + r] = rule.logit(dot[r * lanes])
                # T.max gives its second operand where one is NaN: a NaN is no maximum.
                block.stat[M] = T.max(block.weights[part * PARALLEL_KEYS + r], block.stat[M])

    return logits


def _add_values(rows_of: RowFormat) -> Callable[..., None]:
    """Return the macro (o, step, block, acc): l and acc of the slot are rescaled and get the block's rows."""
    d, lanes, lines = rows_of.dim, vector_lanes(rows_of.dim), -(-rows_of.bytes // LINE)

    @inlined
    def prefetch_value(o, step, r):
        for u in T.unroll(lines):
            T.evaluate(step.prefetch(o.values, step.start + r, u * rows_of.elements_of(LINE)))

    @inlined
    def add_values(o, step, block, acc):
        # The sums so far are relative to the old maximum: the decay rescales l and acc to the new one.
        block.stat[L] = o.state.l[step.slot] * block.stat[DECAY]
        for c in T.unroll(d // lanes):
            for v in T.vectorized(lanes):
                acc[c * lanes + v] = o.state.acc[step.slot, c * lanes + v] * block.stat[DECAY]
        # r: rows of the block. c: unrolled along the head; acc is in registers. v: one vector.
        for r in range(step.count):
            if step.rows.ahead is not None and step.g == 0:
                prefetch_value(o, step, r)
            # l is summed row by row, in the order of acc.
            block.stat[L] += block.weights[r]
            for c in T.unroll(d // lanes):
                for v in T.vectorized(lanes):
                    acc[c * lanes + v] += rows_of.weighted(
                        block.weights[r], row_at(o.values, *step.index(r)), c * lanes, v
                    )
        o.state.l[step.slot] = block.stat[L]
        for c in T.unroll(d // lanes):
            for v in T.vectorized(lanes):
                o.state.acc[step.slot, c * lanes + v] = acc[c * lanes + v]

    return add_values
