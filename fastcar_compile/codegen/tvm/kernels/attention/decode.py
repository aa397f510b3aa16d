"""Decode attention: one query row per head over the filled part of the cache."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.heads import heads_together
from fastcar_compile.codegen.tvm.kernels.attention.online import context_parts, head_splits, online_softmax
from fastcar_compile.codegen.tvm.kernels.attention.softmax import KEY_BLOCK, Group, LogitRule, Operands, Rows, State
from fastcar_compile.codegen.tvm.kernels.script import access, kernel
from fastcar_compile.codegen.tvm.kernels.vectors import exp_not_positive
from fastcar_compile.ir.ops.operator import row_size

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


def filled_rows(position: Any, row: Any, size: int) -> Any:
    """Return how many of `size` cache rows query row `row` of a call at `position` sees, from row 0 on."""
    return T.min(T.Cast("int32", position) + row + 1, size)


def _itself(row: Any) -> Any:
    return row


@kernel
def decode_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    dtype: str = "float32",
    softcap: float | None = None,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return softmax(scale * q k^T) v, grouped-query, over cache rows 0 .. position: float32 [B, Hq, 1, D].

    query float32 [B, Hq, 1, D], keys and values [B, Hkv, S, D] of `dtype`. A cached row is read from memory once for
    all query heads of its group. Time grows with the position, not with S. Parallel over key/value heads and, where
    those are few, over query heads of a small cache, or parts of the context. Such partial results are then rescaled
    and added.
    """
    b, hq, _, d = query
    hkv, s = cache[1], cache[2]
    group, width = hq // hkv, row_size(d, dtype)
    elements = b * hkv * s * d * 2
    pieces = context_parts(b * hkv, elements)
    # A context is cut in parts, or the group's heads in splits: head_splits is 1 where context_parts is not 0.
    parts, splits = max(pieces, 1), head_splits(group, heads_together(d, group, dtype, isa), elements)
    loop = T.parallel if pieces or splits > 1 else T.serial
    size = group // splits
    softmax = online_softmax(d, size, LogitRule(scale, softcap), dtype, isa)

    def ahead_of(last: Any, j: Any) -> Any:
        # Past the rows 0 .. last - 1 of a head come those of the next head.
        later = j + softmax.ahead
        return T.if_then_else(later < last, later, later - last + s)

    @script.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, hq, 1, d), "float32"),
        keys: T.Buffer((b, hkv, s, width), dtype),
        values: T.Buffer((b, hkv, s, width), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, 1, d), "float32"),
    ):
        with T.sblock("heads"):
            access([q, keys, values, position], [y])
            # One slot per query head and part of its context.
            acc = T.alloc_buffer((b * hkv * parts * group, d), "float32")
            m = T.alloc_buffer((b * hkv * parts * group,), "float32")
            l = T.alloc_buffer((b * hkv * parts * group,), "float32")  # noqa: E741
            # item: key/value heads, then pieces of their query heads or of the context
            for item in loop(b * hkv * splits * parts):
                bi: T.let = item // (hkv * splits * parts)
                h: T.let = item // (splits * parts) % hkv
                head: T.let = item // parts % (hkv * splits) * size
                filled: T.let = filled_rows(position[0], 0, s)
                # Parts are whole blocks, so only the last block of a context is not full.
                span: T.let = (filled + parts * KEY_BLOCK - 1) // (parts * KEY_BLOCK) * KEY_BLOCK
                # A part that begins behind the filled rows has an empty range. Its slots stay empty: l and acc are 0.
                first: T.let = item % parts * span
                last: T.let = T.min(first + span, filled)
                softmax.clear(State(m, l, acc), item * size)
                softmax.attend(
                    Operands(q, keys, values, State(m, l, acc)),
                    Group(bi, h, head, 0, item * size),
                    Rows(first, last, _itself, partial(ahead_of, last)),
                )
            # All parts are done. Joining them is serial: it takes parts * D products per head.
            for row in range(b * hkv * splits):
                softmax.finish(
                    y,
                    State(m, l, acc),
                    Group(
                        row // (hkv * splits),
                        row // splits % hkv,
                        row % (hkv * splits) * size,
                        0,
                        row * parts * size,
                    ),
                    parts,
                )

    return attend


# Sparse attention over a ring cache, and the row of an earlier key. ops/window.py defines the rows.


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


@kernel
def ring_row(back: int, sinks: int, ring: int) -> PrimFunc:
    """Return the ring row of position - back, clamped to position 0: int64 [1]."""

    @script.prim_func(private=True, s_tir=True)
    def row_of_earlier_key(position: T.Buffer((1,), "int64"), row: T.Buffer((1,), "int64")):
        with T.sblock("row"):
            access([position], [row])
            p: T.let = T.max(position[0] - T.int64(back), T.int64(0))
            row[0] = T.if_then_else(p < T.int64(sinks), p, T.int64(sinks) + (p - T.int64(sinks)) % T.int64(ring))

    return row_of_earlier_key


@kernel
def window_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    sinks: int,
    window: int,
    dtype: str = "float32",
    softcap: float | None = None,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return grouped-query attention to the sinks and the window of every query row: float32 [B, Hq, T, D].

    query and sink_query float32 [B, Hq, T, D], keys and values [B, Hkv, sinks + R, D] of `dtype`. sink_query meets the
    sinks, query the window, whose row j is position begin + j of the sequence. Time grows with sinks + window only.
    Parallel over query rows, key/value heads and, where those are few, parts of the window. The rows of a chunk read
    what the first row has fetched, so only a single row prefetches.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, ring, width = hq // hkv, s - sinks, row_size(d, dtype)
    elements = b * hkv * t * (sinks + window) * d * 2
    pieces = context_parts(b * hkv * t, elements)
    parts, splits = max(pieces, 1), head_splits(group, heads_together(d, group, dtype, isa), elements)
    loop = T.parallel if pieces or splits > 1 else T.serial
    slots, size = b * hkv * t * parts * group, group // splits
    softmax = online_softmax(d, size, LogitRule(scale, softcap), dtype, isa)

    def sink(j: Any) -> Any:
        return j

    def sink_of_next_head(j: Any) -> Any:
        return j + s

    def recent(base: Any, j: Any) -> Any:
        """Return the cache row of the window's row j; base + j is below 2 * ring."""
        # A subtraction, because the remainder by `ring` would be a division in the loop over rows.
        return sinks + base + j - T.Select(base + j >= ring, ring, 0)

    def ahead_of(seen: Any, base: Any, j: Any) -> Any:
        """Return the row to prefetch; past the last row come those of the next head."""
        # A window may have fewer rows than the prefetch distance.
        later = j + T.min(softmax.ahead, seen)
        past = later >= seen
        return recent(base, later - T.Select(past, seen, 0)) + T.Select(past, s, 0)

    @script.prim_func(private=True, s_tir=True)
    def attend_to_window(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, width), dtype),
        values: T.Buffer((b, hkv, s, width), dtype),
        position: T.Buffer((1,), "int64"),
        sink_q: T.Buffer((b, hq, t, d), "float32"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        with T.sblock("heads"):
            access([q, sink_q, keys, values, position], [y])
            acc = T.alloc_buffer((slots, d), "float32")
            m = T.alloc_buffer((slots,), "float32")
            l = T.alloc_buffer((slots,), "float32")  # noqa: E741
            # item: key/value heads, pieces of their query heads, query rows, pieces of the context
            for item in loop(b * hkv * splits * t * parts):
                bi: T.let = item // (hkv * splits * t * parts)
                h: T.let = item // (splits * t * parts) % hkv
                head: T.let = item // (t * parts) % (hkv * splits) * size
                i: T.let = item // parts % t
                p: T.let = T.Cast("int32", position[0]) + i
                # begin: first position of the window, behind the sinks. base: its row of the ring.
                # seen: rows of the window up to position p.
                begin: T.let = T.max(p - (window - 1), sinks)
                base: T.let = (begin - sinks) % ring
                seen: T.let = T.max(p + 1 - begin, 0)
                # Parts are whole blocks of rows, so only the last block is not full.
                span: T.let = (seen + parts * KEY_BLOCK - 1) // (parts * KEY_BLOCK) * KEY_BLOCK
                first: T.let = item % parts * span
                softmax.clear(State(m, l, acc), item * size)
                if sinks > 0:
                    # The first part meets the sinks. The other parts have an empty range of them.
                    met: T.let = T.if_then_else(item % parts == 0, T.min(p + 1, sinks), 0)
                    softmax.attend(
                        Operands(sink_q, keys, values, State(m, l, acc)),
                        Group(bi, h, head, i, item * size),
                        Rows(0, met, sink, sink_of_next_head if t == 1 else None),
                    )
                softmax.attend(
                    Operands(q, keys, values, State(m, l, acc)),
                    Group(bi, h, head, i, item * size),
                    Rows(
                        first,
                        T.min(first + span, seen),
                        partial(recent, base),
                        partial(ahead_of, seen, base) if t == 1 else None,
                    ),
                )
            # All parts are done. A row's parts are joined serially.
            for row in range(b * hkv * splits * t):
                softmax.finish(
                    y,
                    State(m, l, acc),
                    Group(
                        row // (hkv * splits * t),
                        row // (splits * t) % hkv,
                        row // t % (hkv * splits) * size,
                        row % t,
                        row * parts * size,
                    ),
                    parts,
                )

    return attend_to_window


# Cross-attention: every query row over all tokens of a context, under a mask.


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


LANES = 16
"""Partial sums of a product of query and key."""

PARALLEL_ELEMENTS = 1 << 16
"""Products of elements from which a parallel region pays."""


@kernel
def context_attention(
    query: tuple[int, ...], values_of: tuple[int, ...], mask_rows: int, scale: float, softcap: float | None = None
) -> PrimFunc:
    """Return softmax(scale * q k^T + mask) v, grouped-query: float32 [B, Hq, T, Dv].

    query float32 [B, Hq, T, D], keys float32 [B, Hkv, L, D], values float32 [B, Hkv, L, Dv]; mask float32
    [mask_rows, 1, 1, L], of one row for all of the batch or one for each. Parallel over query heads and rows; each
    keeps the logits of its context.
    """
    b, hq, t, d = query
    _, hkv, n, dv = values_of
    group, whole, rule = hq // hkv, d // LANES * LANES, LogitRule(scale, softcap)
    loop = T.parallel if b * hq * t * n * d >= PARALLEL_ELEMENTS else T.serial

    @script.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, n, d), "float32"),
        values: T.Buffer((b, hkv, n, dv), "float32"),
        mask: T.Buffer((mask_rows, 1, 1, n), "float32"),
        y: T.Buffer((b, hq, t, dv), "float32"),
    ):
        with T.sblock("rows"):
            access([q, keys, values, mask], [y])
            for item in loop(b * hq * t):
                bi: T.let = item // (hq * t)
                h: T.let = item // t % hq
                row: T.let = item % t
                kh: T.let = h // group
                # The logits of all tokens are kept: maximum, weights and values are three passes.
                logits = T.alloc_buffer((n,), "float32")
                lanes = T.alloc_buffer((LANES,), "float32")
                state = T.alloc_buffer((2,), "float32")  # the maximum; the sum of the weights
                state[0] = T.min_value("float32")
                # j: tokens. c: vectors along D. v: 16 partial sums, in registers.
                for j in range(n):
                    for v in T.vectorized(LANES):
                        lanes[v] = T.float32(0)
                    for c in range(d // LANES):
                        for v in T.vectorized(LANES):
                            lanes[v] += q[bi, h, row, c * LANES + v] * keys[bi, kh, j, c * LANES + v]
                    # The remainder of D goes on in the first lanes.
                    for c in range(d - whole):
                        lanes[c] += q[bi, h, row, whole + c] * keys[bi, kh, j, whole + c]
                    for v in range(1, LANES):
                        lanes[0] += lanes[v]
                    # The mask is added after the soft-cap, which would limit a masked logit too.
                    logits[j] = rule.logit(lanes[0]) + mask[bi % mask_rows, 0, 0, j]
                    state[0] = T.max(state[0], logits[j])
                for j in range(n):
                    logits[j] = exp_not_positive(logits[j] - state[0])
                state[1] = T.float32(0)
                for j in range(n):
                    state[1] += logits[j]
                for c in range(dv):
                    y[bi, h, row, c] = T.float32(0)
                # j: tokens in order. c: columns, which are independent sums in y, so LLVM vectorises them.
                for j in range(n):
                    for c in range(dv):
                        y[bi, h, row, c] += logits[j] * values[bi, kh, j, c]
                for c in range(dv):
                    y[bi, h, row, c] = y[bi, h, row, c] / state[1]

    return attend
