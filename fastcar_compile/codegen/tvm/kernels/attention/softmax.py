"""From a product of query and key to its logit, to its weight, and to a sum of values: online softmax over blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.cache import Row, RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, PREFETCH_BYTES, Expr, exp_not_positive, vector_lanes


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
        return T.float32(self.softcap) * vectors.tanh(scaled * T.float32(1 / self.softcap))


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
    """Query heads from number `first` on, which share key/value head h: row i of batch row b, a row of `video`.

    Their slots begin at `slot`.
    """

    b: Expr
    video: Expr
    h: Expr
    first: Expr
    i: Expr
    slot: Expr


@dataclass(frozen=True)
class SoftmaxRows:
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
class SoftmaxStep:
    """Query head g of a group meets the block of `count` rows from number `start` on."""

    group: Group
    rows: SoftmaxRows
    g: Expr
    start: Expr
    count: Expr

    @property
    def slot(self) -> Expr:
        """The slot of the query head."""
        return self.group.slot + self.g

    def query(self, q: Any, head: Expr = 0) -> Row:
        """Return the query row of head g + `head`."""
        return row_at(q, self.group.b, self.group.first + self.g + head, self.group.i)

    def index(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the cache index of the block's row of that number."""
        return self.group.video, self.group.h, self.rows.at(self.start + number)

    def clamped(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the same. The last row stands for those past the range."""
        return self.group.video, self.group.h, self.rows.at(T.min(self.start + number, self.rows.last - 1))

    def prefetch(self, cache: Any, row: Expr, element: Expr) -> Expr:
        """Return the prefetch of a line of the row that is read after row `row` of the range; it has one ahead."""
        assert self.rows.ahead is not None
        return vectors.prefetch(cache[self.group.video, self.group.h, self.rows.ahead(row), element])


M, DECAY, L = 0, 1, 2
"""Elements of `stat` of a block."""


def block_buffers() -> Any:
    """Allocate the temporaries of a block.

    weights holds logits, then exp(logit - m), and 0 past the block's rows. stat[M] is the maximum with this block,
    stat[DECAY] is exp(old m - m), which rescales what was summed before, and stat[L] is the normaliser.
    """
    return script.temporaries(weights=(KEY_BLOCK, "float32"), stat=(3, "float32"))


@dataclass(frozen=True)
class AttendRows:
    """How a query meets cached rows of one type.

    Attributes:
        ahead: the prefetch distance in rows.
        attend: macro (Operands, Group, Rows) that adds the rows to the group's slots.
    """

    ahead: int
    attend: Callable[..., None]


@script.inlined
def weigh_block(state, slot, count, block):
    """Replace a block's logits by weights, update the running maximum of the slot, and set the block's decay."""
    # The running maximum never falls, so the argument is not positive.
    block.stat[DECAY] = exp_not_positive(state.m[slot] - block.stat[M])
    state.m[slot] = block.stat[M]
    # r: 32 weights, vectorised. A row past the block's end has a copy of a logit or an old one: its weight is 0.
    for r in T.vectorized(KEY_BLOCK):
        block.weights[r] = T.Select(r < count, exp_not_positive(block.weights[r] - block.stat[M]), T.float32(0))


@script.inlined
def for_blocks(heads, rows, group, together, meet, operands):
    """Call the macro meet(*operands, step) for every block of rows and every `together` of `group` query heads."""
    # number: blocks of rows in order. g: query heads, which find the block in the first-level cache.
    for number in range((rows.last - rows.first + KEY_BLOCK - 1) // KEY_BLOCK):
        for g in range(group // together):
            count: T.let = T.min(rows.last - rows.first - number * KEY_BLOCK, KEY_BLOCK)
            start: T.let = rows.first + number * KEY_BLOCK
            meet(*operands, SoftmaxStep(heads, rows, g * together, start, count))


@script.inlined
def prefetch_rows(rows_of, count, cache, step, number, piece):
    """Prefetch `count` adjacent rows for those from `number` of the block on.

    Only the first piece of the first query heads does: the others find the rows in the first-level cache.
    """
    if step.rows.ahead is not None and step.g + piece == 0:
        for line in T.unroll(-(-count * rows_of.bytes // LINE)):
            T.evaluate(step.prefetch(cache, step.start + number, line * rows_of.elements_of(LINE)))


# A query meets cached rows as float32: every element is widened where it is read.


def attend_rows(d: int, group: int, rule: LogitRule, dtype: str, isa: InstructionSet) -> AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    rows_of, lanes = RowFormat(d, dtype, isa), vector_lanes(d)

    @script.inlined
    def attend(o, heads, rows):
        block = block_buffers()
        # dot: partial sums of four keys. acc: the accumulator of one query head. Both stay in registers in their loops.
        dot = T.alloc_buffer((PARALLEL_KEYS * lanes,), "float32")
        acc = T.alloc_buffer((d,), "float32")
        for_blocks(heads, rows, group, 1, _attend_block, (rows_of, rule, o, block, dot, acc))

    return AttendRows(PREFETCH_BYTES // rows_of.bytes, attend)


@script.inlined
def _attend_block(rows_of, rule, o, block, dot, acc, step):
    block.stat[M] = o.state.m[step.slot]
    _logits(rows_of, rule, vector_lanes(rows_of.dim), o, step, block, dot)
    weigh_block(o.state, step.slot, step.count, block)
    _add_values(rows_of, vector_lanes(rows_of.dim), o, step, block, acc)


@script.inlined
def _multiply(rows_of, lanes, stride, o, step, part, dot):
    # r: four keys at a time. c: unrolled along the head; dot is in registers. v: one vector.
    for r in T.unroll(PARALLEL_KEYS):
        for c in T.unroll(rows_of.dim // stride):
            for v in T.vectorized(lanes):
                dot[r * lanes + v] += rows_of.product(
                    step.query(o.q), row_at(o.keys, *step.clamped(part * PARALLEL_KEYS + r)), c * stride, v, lanes
                )


@script.inlined
def _prefetch_keys(rows_of, lines, keys, step, part):
    # r: unrolled, the lines of four rows, line r % lines of row r // lines.
    for r in T.unroll(PARALLEL_KEYS * lines):
        T.evaluate(
            step.prefetch(keys, step.start + part * PARALLEL_KEYS + r // lines, r % lines * rows_of.elements_of(LINE))
        )


@script.inlined
def _logits(rows_of, rule, lanes, o, step, block, dot):
    """Turn the block's weights into logits, and its m into their maximum with m."""
    # part: four keys, of which those past the last row are the last row again. `weigh_block` makes their weights 0.
    for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
        for r in T.unroll(PARALLEL_KEYS):
            for v in T.vectorized(lanes):
                dot[r * lanes + v] = T.float32(0)
        # Only the first query head prefetches: the others find the rows in the first-level cache.
        if step.rows.ahead is not None and step.g == 0:
            _prefetch_keys(rows_of, -(-rows_of.bytes // LINE), o.keys, step, part)
        # The vectors that share a block's exponent are one step: they are multiplied by its power of two together.
        _multiply(rows_of, lanes, lanes * rows_of.vectors_of_block(lanes), o, step, part, dot)
        # The sum across lanes has one order on every instruction set. `attend_heads` repeats it.
        for r in T.unroll(PARALLEL_KEYS):
            vectors.add_lanes(dot, r * lanes, lanes)
            block.weights[part * PARALLEL_KEYS + r] = rule.logit(dot[r * lanes])
            # T.max gives its second operand where one is NaN: a NaN is no maximum.
            block.stat[M] = T.max(block.weights[part * PARALLEL_KEYS + r], block.stat[M])


@script.inlined
def _add_values(rows_of, lanes, o, step, block, acc):
    """Rescale l and acc of the slot, and add the block's rows."""
    # The sums so far are relative to the old maximum: the decay rescales l and acc to the new one.
    block.stat[L] = o.state.l[step.slot] * block.stat[DECAY]
    for c in T.unroll(rows_of.dim // lanes):
        for v in T.vectorized(lanes):
            acc[c * lanes + v] = o.state.acc[step.slot, c * lanes + v] * block.stat[DECAY]
    # r: rows of the block. c: unrolled along the head; acc is in registers. v: one vector.
    for r in range(step.count):
        prefetch_rows(rows_of, 1, o.values, step, r, 0)
        # l is summed row by row, in the order of acc.
        block.stat[L] += block.weights[r]
        for c in T.unroll(rows_of.dim // lanes):
            for v in T.vectorized(lanes):
                acc[c * lanes + v] += rows_of.weighted(block.weights[r], row_at(o.values, *step.index(r)), c * lanes, v)
    o.state.l[step.slot] = block.stat[L]
    for c in T.unroll(rows_of.dim // lanes):
        for v in T.vectorized(lanes):
            o.state.acc[step.slot, c * lanes + v] = acc[c * lanes + v]
