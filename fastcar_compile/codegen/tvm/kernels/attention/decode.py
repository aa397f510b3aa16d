"""Decode attention: one query row per head over the filled part of the cache."""

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
        T.func_attr({"op_pattern": OPAQUE})
        with T.sblock("heads"):
            T.reads(
                q[0:b, 0:hq, 0:1, 0:d],
                keys[0:b, 0:hkv, 0:s, 0:width],
                values[0:b, 0:hkv, 0:s, 0:width],
                position[0:1],
            )
            T.writes(y[0:b, 0:hq, 0:1, 0:d])
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
