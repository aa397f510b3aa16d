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
from fastcar_compile.codegen.tvm.kernels.attention.exponential import LogitRule
from fastcar_compile.codegen.tvm.kernels.attention.online_softmax import context_parts, online_softmax
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
    those are few, parts of the context. The partial results are then rescaled and added.
    """
    b, hq, _, d = query
    hkv, s = cache[1], cache[2]
    group, width = hq // hkv, row_size(d, dtype)
    pieces = context_parts(b * hkv, b * hkv * s * d * 2)
    parts = max(pieces, 1)
    loop = T.parallel if pieces else T.serial
    softmax = online_softmax(d, group, LogitRule(scale, softcap), dtype, isa)

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
            acc = T.alloc_buffer((b * hkv * parts * group, d), "float32")
            m = T.alloc_buffer((b * hkv * parts * group,), "float32")
            l = T.alloc_buffer((b * hkv * parts * group,), "float32")  # noqa: E741
            for item in loop(b * hkv * parts):
                bi: T.let = item // (hkv * parts)
                h: T.let = item // parts % hkv
                filled: T.let = filled_rows(position[0], 0, s)
                span: T.let = (filled + parts * KEY_BLOCK - 1) // (parts * KEY_BLOCK) * KEY_BLOCK
                first: T.let = item % parts * span
                last: T.let = T.min(first + span, filled)
                softmax.clear(State(m, l, acc), item * group)
                softmax.attend(
                    Operands(q, keys, values, State(m, l, acc)),
                    Group(bi, h, 0, item * group),
                    Rows(first, last, _itself, partial(ahead_of, last)),
                )
            for head in range(b * hkv):
                softmax.finish(y, State(m, l, acc), Group(head // hkv, head % hkv, 0, head * parts * group), parts)

    return attend
