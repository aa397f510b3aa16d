"""Decode attention: one query row per head over the filled part of the cache, and query rows over a window of it.

Both are one pass over cached rows by online softmax (FlashAttention). Every slot of the state is a partial result:
running maximum m, normaliser l and accumulator acc, the latter two relative to exp(m).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention import heads as attend_heads
from fastcar_compile.codegen.tvm.kernels.attention import softmax
from fastcar_compile.codegen.tvm.kernels.attention.softmax import KEY_BLOCK, LOWEST, LogitRule, Operands
from fastcar_compile.codegen.tvm.kernels.cache import number_of
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, exp_not_positive
from fastcar_compile.config.formats import kv_type

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


PARALLEL_CACHE_ELEMENTS = 1 << 18
"""Cache elements from which a second thread pays for launching and awaiting a parallel region."""

SPLIT_CACHE_ELEMENTS = 1 << 16
"""Cache elements from which it pays where the pieces are whole query heads: no partial results are added."""

PARTS = 16
"""The least pieces of work of a parallel region. Few or an odd number of heads are cut along the context."""


def context_parts(heads: int, elements: int) -> int:
    """Return into how many parts the context of every head is cut, or 0 where a parallel region does not pay."""
    if elements < PARALLEL_CACHE_ELEMENTS:
        return 0
    parts = 1
    # Parts double until heads * parts is at least 12 pieces of work.
    while heads * parts < PARTS * 3 // 4:
        parts *= 2
    return parts


def head_splits(group: int, together: int, elements: int) -> int:
    """Return into how many pieces the query heads of a group are cut, for a context that is not cut.

    Heads that share a pass over the rows stay together. The results do not depend on it, and on one thread it costs
    nothing: a small cache stays in the second-level cache.
    """
    return group // together if SPLIT_CACHE_ELEMENTS <= elements < PARALLEL_CACHE_ELEMENTS else 1


def _attend_rows(d: int, group: int, rule: LogitRule, dtype: str, isa: InstructionSet) -> softmax.AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    kind = attend_heads if attend_heads.heads_together(d, group, dtype, isa) > 1 else softmax
    return kind.attend_rows(d, group, rule, dtype, isa)


@script.inlined
def _clear(d, group, state, slot):
    """Empty the slots of a group."""
    for g in range(group):
        state.m[slot + g] = T.float32(LOWEST)
        state.l[slot + g] = T.float32(0)
        for c in T.vectorized(d):
            state.acc[slot + g, c] = T.float32(0)


@script.inlined
def _finish(d, group, y, state, heads, parts):
    """Write the results of a group.

    The partial results of its query heads are in `parts` runs of slots, a group apart, and are rescaled to one maximum
    and added.
    """
    acc = T.alloc_buffer((d,), "float32")
    stat = T.alloc_buffer((3,), "float32")  # m, l, and the factor that rescales one part
    for g in range(group):
        stat[0] = T.float32(LOWEST)
        # First the maximum over all parts, then one pass that rescales every part to it, in the order of the parts.
        for p in range(parts):
            stat[0] = T.max(stat[0], state.m[heads.slot + p * group + g])
        stat[1] = T.float32(0)
        for c in T.vectorized(d):
            acc[c] = T.float32(0)
        for p in range(parts):
            # An empty part has l and acc of 0: its factor does not matter. A single part has the factor exp(0) = 1.
            stat[2] = exp_not_positive(state.m[heads.slot + p * group + g] - stat[0])
            stat[1] += stat[2] * state.l[heads.slot + p * group + g]
            for c in T.vectorized(d):
                acc[c] += stat[2] * state.acc[heads.slot + p * group + g, c]
        for c in T.vectorized(d):
            # A row that is not there has met nothing, and is zero.
            y[heads.b, heads.first + g, heads.i, c] = T.Select(stat[1] == T.float32(0), T.float32(0), acc[c] / stat[1])


def filled_rows(position: Any, row: Any, size: int) -> Any:
    """Return how many of `size` cache rows query row `row` of a call at `position` sees, from row 0 on."""
    return T.min(T.Cast("int32", position) + row + 1, size)


def _itself(row: Any) -> Any:
    return row


@dataclass(frozen=True)
class _Items:
    """How attention is cut into items of one loop.

    Attributes:
        query, hkv: shape of the query, key/value heads. share: rows of the query for each row set of the cache.
        splits: pieces of the query heads of a key/value head. parts: pieces of the context.
        loop: over the items.
        rows: the macros for the query heads of a piece.
    """

    query: HeadShape
    hkv: int
    share: int
    splits: int
    parts: int
    loop: Any
    rows: softmax.AttendRows

    @classmethod
    def of(
        cls, query: HeadShape, cache: HeadShape, rows: int, rule: LogitRule, dtype: str, isa: InstructionSet
    ) -> _Items:
        """Return the cut for `rows` cached rows. A context is cut in parts, or the heads of a group in splits."""
        (b, hq, t, d), (videos, hkv, *_) = query, cache
        group, elements = hq // hkv, b * hkv * t * rows * d * 2
        pieces = context_parts(b * hkv * t, elements)
        splits = head_splits(group, attend_heads.heads_together(d, group, dtype, isa), elements)
        loop = T.parallel if pieces or splits > 1 else T.serial
        return cls(
            query, hkv, b // videos, splits, max(pieces, 1), loop, _attend_rows(d, group // splits, rule, dtype, isa)
        )

    @property
    def pieces(self) -> int:
        """Pieces of the query heads."""
        return self.hkv * self.splits

    @property
    def size(self) -> int:
        """Query heads of a piece."""
        return self.query[1] // self.pieces

    def span(self, rows: Expr) -> Expr:
        """Return the rows of a part of `rows` rows: whole blocks, so only the last block of a context is not full."""
        return (rows + self.parts * KEY_BLOCK - 1) // (self.parts * KEY_BLOCK) * KEY_BLOCK

    def group(self, row: Expr, slot: Expr) -> softmax.Group:
        """Return the query heads of item `row` of one part of the context: pieces of heads, query rows."""
        t, pieces = self.query[2], self.pieces
        h, first = row // (self.splits * t) % self.hkv, row // t % pieces * self.size
        return softmax.Group(row // (pieces * t), row // (pieces * t * self.share), h, first, row % t, slot)


@script.inlined
def _attend(items, meet, q, sink_q, keys, values, position, y):
    """Write y. The macro meet(o, sink_q, group, part, position) has the query heads of an item meet their rows."""
    b, hq, t, d = T.meta_var(items.query)
    parts, pieces, size = T.meta_var((items.parts, items.pieces, items.size))
    # One slot per query head and row, and part of its context.
    state = script.temporaries(
        acc=(b * t * parts * hq, d, "float32"), m=(b * t * parts * hq, "float32"), l=(b * t * parts * hq, "float32")
    )
    # item: key/value heads, pieces of their query heads, query rows, parts of the context
    for item in items.loop(b * pieces * t * parts):
        bi: T.let = item // (pieces * t * parts)
        h: T.let = item // (items.splits * t * parts) % items.hkv
        head: T.let = item // (t * parts) % pieces * size
        i: T.let = item // parts % t
        _clear(d, size, state, item * size)
        group = T.meta_var(softmax.Group(bi, bi // items.share, h, head, i, item * size))
        meet(Operands(q, keys, values, state), sink_q, group, item % parts, position)
    # All parts are done. Joining them is serial: it takes parts * D products per head.
    for row in range(b * pieces * t):
        _finish(d, size, y, state, items.group(row, row * parts * size), parts)


def _kernel(
    items: _Items,
    meet: Callable[..., None],
    cache: HeadShape,
    dtype: str,
    positions: Sequence[int],
    *,
    sink_query: bool,
) -> PrimFunc:
    """Return the kernel of query, keys, values and position, with `sink_query` of that too, and of the result.

    Args:
        positions: shape of `position`.
    """
    (b, hq, t, d), (videos, hkv, s, _), width = items.query, cache, kv_type(dtype).row_size(items.query[3])

    @script.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((videos, hkv, s, width), dtype),
        values: T.Buffer((videos, hkv, s, width), dtype),
        position: T.Buffer(positions, "int64"),
        sink_q: T.Buffer((b, hq, t, d), "float32"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        with T.sblock("heads"):
            script.access([q, sink_q, keys, values, position] if sink_query else [q, keys, values, position], [y])
            _attend(items, meet, q, sink_q if sink_query else q, keys, values, position, y)

    return attend if sink_query else script.without(attend, 4)


@script.kernel
def decode_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    dtype: str = "float32",
    softcap: float | None = None,
    positions: int = 1,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return softmax(scale * q k^T) v, grouped-query, over cache rows 0 .. position: float32 [B, Hq, 1, D].

    query float32 [B, Hq, 1, D], keys and values [V, Hkv, S, D] of `dtype`. Row b reads row set b // (B / V) up to its
    own position, or with one position of all up to that. A cached row is read from memory once for
    all query heads of its group. Time grows with the position, not with S. Parallel over key/value heads and, where
    those are few, over query heads of a small cache, or parts of the context. Such partial results are then rescaled
    and added.
    """
    s = cache[2]
    items = _Items.of(query, cache, s, LogitRule(scale, softcap), dtype, isa)

    def ahead_of(last: Any, j: Any) -> Any:
        # Past the rows 0 .. last - 1 of a head come those of the next head.
        later = j + items.rows.ahead
        return T.if_then_else(later < last, later, later - last + s)

    @script.inlined
    def meet(o, _sink_q, group, part, position):
        filled: T.let = filled_rows(number_of(position, group.b), 0, s)
        span: T.let = items.span(filled)
        # A part that begins behind the filled rows has an empty range. Its slots stay empty: l and acc are 0.
        first: T.let = part * span
        last: T.let = T.min(first + span, filled)
        items.rows.attend(o, group, softmax.SoftmaxRows(first, last, _itself, partial(ahead_of, last)))

    return _kernel(items, meet, cache, dtype, (positions,), sink_query=False)


# Sparse attention over a ring cache, and the row of an earlier key. ops/window.py defines the rows.


@script.kernel
def ring_row(back: int, sinks: int, ring: int, positions: int = 1) -> PrimFunc:
    """Return the ring rows of positions - back, clamped to position 0: int64 [positions]."""

    @script.prim_func(private=True, s_tir=True)
    def row_of_earlier_key(position: T.Buffer((positions,), "int64"), row: T.Buffer((positions,), "int64")):
        for i in range(positions):
            with T.sblock("row"):
                script.access([position], [row])
                p: T.let = T.max(position[i] - T.int64(back), T.int64(0))
                row[i] = T.if_then_else(p < T.int64(sinks), p, T.int64(sinks) + (p - T.int64(sinks)) % T.int64(ring))

    return row_of_earlier_key


@script.kernel
def window_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    sinks: int,
    window: int,
    dtype: str = "float32",
    softcap: float | None = None,
    positions: int = 1,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return grouped-query attention to the sinks and the window of every query row: float32 [B, Hq, T, D].

    query and sink_query float32 [B, Hq, T, D], keys and values [V, Hkv, sinks + R, D] of `dtype`. sink_query meets the
    sinks, query the window, whose row j is position begin + j of the sequence. Time grows with sinks + window only.
    Parallel over query rows, key/value heads and, where those are few, parts of the window. The rows of a chunk read
    what the first row has fetched, so only a single row prefetches.
    """
    t, s = query[2], cache[2]
    items = _Items.of(query, cache, sinks + window, LogitRule(scale, softcap), dtype, isa)
    ring = s - sinks

    def sink_of_next_head(j: Any) -> Any:
        return j + s

    def recent(base: Any, j: Any) -> Any:
        """Return the cache row of the window's row j; base + j is below 2 * ring."""
        # A subtraction, because the remainder by `ring` would be a division in the loop over rows.
        return sinks + base + j - T.Select(base + j >= ring, ring, 0)

    def ahead_of(seen: Any, base: Any, j: Any) -> Any:
        """Return the row to prefetch; past the last row come those of the next head."""
        # A window may have fewer rows than the prefetch distance.
        later = j + T.min(items.rows.ahead, seen)
        past = later >= seen
        return recent(base, later - T.Select(past, seen, 0)) + T.Select(past, s, 0)

    @script.inlined
    def meet(o, sink_q, group, part, position):
        p: T.let = T.Cast("int32", number_of(position, group.b)) + group.i
        # begin: first position of the window, behind the sinks. base: its row of the ring.
        # seen: rows of the window up to position p.
        begin: T.let = T.max(p - (window - 1), sinks)
        base: T.let = (begin - sinks) % ring
        seen: T.let = T.max(p + 1 - begin, 0)
        span: T.let = items.span(seen)
        first: T.let = part * span
        if sinks > 0:
            # The first part meets the sinks. The other parts have an empty range of them.
            met: T.let = T.if_then_else(part == 0, T.min(p + 1, sinks), 0)
            items.rows.attend(
                Operands(sink_q, o.keys, o.values, o.state),
                group,
                softmax.SoftmaxRows(0, met, _itself, sink_of_next_head if t == 1 else None),
            )
        ahead = T.meta_var(partial(ahead_of, seen, base) if t == 1 else None)
        items.rows.attend(o, group, softmax.SoftmaxRows(first, T.min(first + span, seen), partial(recent, base), ahead))

    return _kernel(items, meet, cache, dtype, (positions,), sink_query=True)
