"""Sparse attention over a ring cache, and the row of an earlier key. ops/window.py defines the rows."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.attend_heads import heads_together
from fastcar_compile.codegen.tvm.kernels.attention.logit_rule import LogitRule
from fastcar_compile.codegen.tvm.kernels.attention.online_softmax import context_parts, head_splits, online_softmax
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import KEY_BLOCK, Group, Operands, Rows, State
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.ops.cached import row_size


@kernel
def ring_row(back: int, sinks: int, ring: int) -> PrimFunc:
    """Return the ring row of position - back, clamped to position 0: int64 [1]."""

    @script.prim_func(private=True, s_tir=True)
    def row_of_earlier_key(position: T.Buffer((1,), "int64"), row: T.Buffer((1,), "int64")):
        T.func_attr({"op_pattern": OPAQUE})
        with T.sblock("row"):
            T.reads(position[0:1])
            T.writes(row[0:1])
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
        T.func_attr({"op_pattern": OPAQUE})
        with T.sblock("heads"):
            T.reads(
                q[0:b, 0:hq, 0:t, 0:d],
                sink_q[0:b, 0:hq, 0:t, 0:d],
                keys[0:b, 0:hkv, 0:s, 0:width],
                values[0:b, 0:hkv, 0:s, 0:width],
                position[0:1],
            )
            T.writes(y[0:b, 0:hq, 0:t, 0:d])
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
