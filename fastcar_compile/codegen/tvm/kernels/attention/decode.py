"""Decode attention: one query row per head over the filled part of the cache."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.attention.online_softmax import context_parts, online_softmax
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import BLOCK
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.ops.cached import row_size

Shape = tuple[int, int, int, int]


def filled_rows(position: Any, row: Any, size: int) -> Any:
    """How many cache rows query row `row` of a call at `position` sees: the rows 0 .. this - 1 of `size`."""
    return T.min(T.Cast("int32", position) + row + 1, size)


def _itself(row: Any) -> Any:
    return row


@kernel
def decode_attention(
    query: Shape, cache: Shape, scale: float, dtype: str = "float32", isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Grouped-query attention of query [B, Hq, 1, D] over cache [B, Hkv, S, D] of `dtype`, rows 0 .. position.

    A key/value row is read from memory once for all query heads of its group; time grows with the position and not with
    S. Parallel over key/value heads and, where those are few, pieces of the context, whose results are then added with
    their weights.
    """
    b, hq, _, d = query
    hkv, s = cache[1], cache[2]
    group, width = hq // hkv, row_size(d, dtype)
    pieces = context_parts(b * hkv, b * hkv * s * d * 2)
    parts = max(pieces, 1)
    loop = T.parallel if pieces else T.serial
    steps = online_softmax(d, group, scale, dtype, isa)

    def ahead_of(last: Any, j: Any) -> Any:
        """One past the rows 0 .. last - 1 of a head is of the next head's."""
        later = j + steps.ahead
        return T.if_then_else(later < last, later, later - last + s)

    @T.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, hq, 1, d), "float32"),
        keys: T.Buffer((b, hkv, s, width), dtype),
        values: T.Buffer((b, hkv, s, width), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, 1, d), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        with T.sblock("heads"):
            T.reads(
                q[0:b, 0:hq, 0:1, 0:d],
                keys[0:b, 0:hkv, 0:s, 0:width],
                values[0:b, 0:hkv, 0:s, 0:width],
                position[0:1],
            )
            T.writes(y[0:b, 0:hq, 0:1, 0:d])
            sums = T.alloc_buffer((b * hkv * parts * group, d), "float32")
            tops = T.alloc_buffer((b * hkv * parts * group,), "float32")
            totals = T.alloc_buffer((b * hkv * parts * group,), "float32")
            for item in loop(b * hkv * parts):
                bi: T.let = item // (hkv * parts)
                h: T.let = item // parts % hkv
                filled: T.let = filled_rows(position[0], 0, s)
                span: T.let = (filled + parts * BLOCK - 1) // (parts * BLOCK) * BLOCK
                first: T.let = item % parts * span
                last: T.let = T.min(first + span, filled)
                steps.clear(item * group, tops, totals, sums)
                steps.attend(
                    q, 0, keys, values, bi, h, item * group, first, last, _itself,
                    partial(ahead_of, last), tops, totals, sums,
                )  # fmt: skip
            for head in range(b * hkv):
                merged = T.alloc_buffer((d,), "float32")
                share = T.alloc_buffer((3,), "float32")
                steps.finish(
                    y, head // hkv, head % hkv, 0, head * parts * group, parts, merged, share, tops, totals, sums
                )

    return attend
