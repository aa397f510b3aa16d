"""Attention of several rows over one cache: rows of a video and their query heads are query rows of the same keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.chunk import (
    CHUNK_KEYS,
    ChunkShape,
    ChunkTile,
    KeyBlock,
    attend,
    begin,
    convert,
    finish,
    state_buffers,
)
from fastcar_compile.codegen.tvm.kernels.attention.decode import context_parts
from fastcar_compile.codegen.tvm.kernels.attention.softmax import LogitRule
from fastcar_compile.codegen.tvm.kernels.cache import RowFormat
from fastcar_compile.codegen.tvm.kernels.linear.tiles import active_rows, append_active
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, vector_lanes

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


@dataclass(frozen=True)
class RowsShape(ChunkShape):
    """A chunk whose `t` rows are rows of the batch, of which the `active` ones count: row after row, all heads of it.

    A tile is one register of query rows: few rows would fill two badly.
    """

    active: Any

    @property
    def width(self) -> int:
        """The query rows of a tile."""
        return self.rows_of.isa.float_lanes

    @property
    def columns(self) -> int:
        """Columns of the accumulators that are in registers: few query rows by many columns."""
        return next(v for v in (64, 32, 16, 8, 4, 2, 1) if v <= 4 * self.rows_of.isa.float_lanes and self.d % v == 0)

    def number(self, tile: ChunkTile, offset: Expr) -> Expr:
        """Return the place among the active rows of a tile's query row `offset`."""
        return T.min(tile.first + offset, tile.total - 1) // self.group

    def query_row(self, tile: ChunkTile, offset: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the index of a tile's query row `offset`; past the last row, of the last one."""
        head = T.min(tile.first + offset, tile.total - 1) % self.group
        return tile.b * self.t + self.active.rows[self.number(tile, offset)], tile.h * self.group + head, 0

    def sees(self, state: Any, own: Expr, block: KeyBlock, j: Expr) -> Expr:
        """Return which rows of a tile see key j of a block: bit j of state.seen[own]."""
        del block
        bits = T.shift_right(state.seen[own], T.Broadcast(j, self.width))
        return T.bitwise_and(bits, T.Broadcast(T.int32(1), self.width)) != T.Broadcast(T.int32(0), self.width)


def _tile(b: Expr, h: Expr, total: Expr, first: Expr, stride: Expr, slot: Expr) -> ChunkTile:
    return ChunkTile(b, h, first + slot * stride, slot, total)


def _from(place: Expr) -> Expr:
    """Return an int32 with the bits from number `place` on; none from 32 on, all up to 0."""
    bits = T.shift_left(T.int64(-1), T.Cast("int64", T.max(T.min(place, 32), 0)))
    return T.Cast("int32", bits)


def seen_ranges(rows: int, window: int | None) -> Any:
    """Allocate what `find_active` writes: begin and end of the ranges of cached rows that each active row sees, two in
    a ring; the end of what any row sees; what each active row sees of a block, and any of them, as bits.
    """
    ranges = (rows, 1 if window is None else 2, "int32")
    return script.temporaries(begin=ranges, end=ranges, last=(1, "int32"), bits=(rows + 1, "int32"))


@script.inlined
def find_active(active, seen, position, window, cached, y, first, head, group):
    """List the rows that are there, and what they see: the positions up to their own, in a ring of `cached` rows the
    last `window` of these. Write zeros for the others.
    """
    active.count[0] = 0
    seen.last[0] = 0
    for r in range(active.rows.shape[0]):
        if position[first + r] >= T.int64(0):
            i: T.let = active.count[0]
            p: T.let = T.Cast("int32", position[first + r])
            if window is None:
                seen.begin[i, 0] = 0
                seen.end[i, 0] = T.min(p + 1, cached)
            else:
                oldest: T.let = T.max(p - (window - 1), 0)
                start: T.let = T.truncmod(oldest, cached)
                seen.begin[i, 0] = start
                seen.end[i, 0] = T.min(start + p + 1 - oldest, cached)
                seen.begin[i, 1] = 0
                seen.end[i, 1] = T.max(start + p + 1 - oldest - cached, 0)
            seen.last[0] = T.max(seen.last[0], seen.end[i, 0])
            append_active(active, r)
        else:
            for g in range(group):
                for c in range(y.shape[3]):
                    y[first + r, head + g, 0, c] = T.float32(0)


@script.inlined
def see(active, seen, start):
    """Write what each active row sees of the 32 positions from `start` on to seen.bits; what any sees behind them."""
    every = T.meta_var(seen.bits.shape[0] - 1)
    seen.bits[every] = 0
    for i in range(active.count[0]):
        seen.bits[i] = 0
        for n in T.unroll(seen.begin.shape[1]):
            seen.bits[i] = T.bitwise_or(
                seen.bits[i], T.bitwise_xor(_from(seen.begin[i, n] - start), _from(seen.end[i, n] - start))
            )
        seen.bits[every] = T.bitwise_or(seen.bits[every], seen.bits[i])


@script.inlined
def _clear_unseen(count, d, seen, values):
    # A position that no row sees may hold anything, and its weight of 0 times a NaN would be a NaN.
    for j in range(count):
        if T.bitwise_and(T.shift_right(seen, j), 1) == 0:
            for c in range(d):
                values[j, c] = T.float32(0)


@script.kernel
def rows_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    dtype: str,
    softcap: float | None,
    window: int | None,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return softmax(scale * q k^T) v, grouped-query, of rows that share a cache: float32 [B, Hq, 1, D].

    query float32 [B, Hq, 1, D], keys and values [V, Hkv, S, D] of `dtype`, position int64 [B]. A row sees the positions
    up to its own, or the last `window` of these in a ring of S rows. One that is not there, at -1, is zero. Row b reads
    row set b // (B / V): a block of cached rows becomes float32 once for all of its rows and their heads, and a row's
    result does not depend on which others there are, unless one of them sees a NaN. Parallel over key/value heads and,
    where those are few, tiles of query rows.
    """
    (b, hq, _, d), (videos, hkv, s, _) = query, cache
    share, group = b // videos, hq // hkv
    rule, rows_of, width = LogitRule(scale, softcap), RowFormat(d, dtype, isa), isa.float_lanes
    size, most = rows_of.size, -(-share * group // width)
    pieces = context_parts(videos * hkv, b * hq * s * d * 2)
    parts, loop = min(max(pieces, 1), most), T.parallel if pieces else T.serial

    @script.prim_func(private=True, s_tir=True)
    def attend_rows(
        q: T.Buffer((b, hq, 1, d), "float32"),
        keys: T.Buffer((videos, hkv, s, size), dtype),
        values: T.Buffer((videos, hkv, s, size), dtype),
        position: T.Buffer((b,), "int64"),
        y: T.Buffer((b, hq, 1, d), "float32"),
    ):
        for item in loop(videos * hkv * parts):
            with T.sblock("rows"):
                script.access([q, keys, values, position], [y])
                active = active_rows(share)
                shape = T.meta_var(RowsShape(share, s, group, rule, rows_of, active))
                state = state_buffers(shape, -(-most // parts))
                seen = seen_ranges(share, window)
                video: T.let = item // (hkv * parts)
                h: T.let = item // parts % hkv
                part: T.let = item % parts
                find_active(active, seen, position, window, s, y, video * share, h * group, group)
                total: T.let = active.count[0] * group
                tile = T.meta_var(partial(_tile, video, h, total, part * width, parts * width))
                mine: T.let = ((total + width - 1) // width - part + parts - 1) // parts
                for slot in range(mine):
                    begin(shape, q, y, state, tile(slot))
                if mine == 0:
                    seen.last[0] = 0  # no block is converted for a part without tiles
                # block: keys in order. slot: tiles of query rows, which share the block.
                for block in range((seen.last[0] + CHUNK_KEYS - 1) // CHUNK_KEYS):
                    filled = T.meta_var(
                        KeyBlock(block * CHUNK_KEYS, T.min(seen.last[0] - block * CHUNK_KEYS, CHUNK_KEYS))
                    )
                    see(active, seen, block * CHUNK_KEYS)
                    if seen.bits[share] != 0:
                        convert(rows_of, vector_lanes(d), keys, state.keys, (video, h), filled)
                        convert(rows_of, vector_lanes(d), values, state.values, (video, h), filled)
                        _clear_unseen(filled.count, d, seen.bits[share], state.values)
                        for slot in range(mine):
                            for r in range(width):
                                state.seen[slot, r] = seen.bits[shape.number(tile(slot), r)]
                            attend(shape, y, state, tile(slot), filled)
                for slot in range(mine):
                    finish(shape, y, state, tile(slot))

    return attend_rows
