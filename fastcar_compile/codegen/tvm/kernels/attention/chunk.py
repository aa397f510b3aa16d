"""Attention of a prefill chunk: many query rows over the filled part of the cache, as two small matrix products."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.chunk_tiles import (
    CHUNK_KEYS,
    ChunkOperands,
    ChunkShape,
    ChunkState,
    KeyBlock,
    Tile,
    attend_tile,
    begin_tile,
    convert_block,
    finish_tile,
)
from fastcar_compile.codegen.tvm.kernels.attention.decode import filled_rows
from fastcar_compile.codegen.tvm.kernels.attention.logit_rule import LogitRule
from fastcar_compile.codegen.tvm.kernels.attention.online_softmax import context_parts
from fastcar_compile.codegen.tvm.kernels.cache.elements import RowFormat
from fastcar_compile.codegen.tvm.kernels.script import kernel


@kernel
def chunk_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    dtype: str = "float32",
    softcap: float | None = None,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return causal grouped-query attention: row i of query [B, Hq, T, D] sees cache rows 0 .. position + i.

    The result and query are float32 [B, Hq, T, D], keys and values [B, Hkv, S, D] of `dtype`. Online softmax over
    blocks of keys. A block becomes float32 once for all query rows of its group. Blocks that no row of a tile sees are
    skipped. Parallel over key/value heads and, where those are few, tiles of query rows: every item has tiles from all
    of the chunk, because later rows see more.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    shape = ChunkShape(t, s, hq // hkv, LogitRule(scale, softcap), RowFormat(d, dtype, isa))
    size, width, tiles = shape.rows_of.size, shape.width, shape.tiles
    pieces = context_parts(b * hkv, b * hq * t * s * d // 2)
    # An item without a tile would convert the block for nothing, so there are at most as many parts as tiles.
    parts = min(max(pieces, 1), tiles)
    slots = -(-tiles // parts)
    loop = T.parallel if pieces else T.serial
    begin, convert, attend, finish = (make(shape) for make in (begin_tile, convert_block, attend_tile, finish_tile))

    @script.prim_func(private=True, s_tir=True)
    def attend_chunk(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, size), dtype),
        values: T.Buffer((b, hkv, s, size), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for item in loop(b * hkv * parts):
            with T.sblock("rows"):
                T.reads(
                    q[0:b, 0:hq, 0:t, 0:d],
                    keys[0:b, 0:hkv, 0:s, 0:size],
                    values[0:b, 0:hkv, 0:s, 0:size],
                    position[0:1],
                )
                T.writes(y[0:b, 0:hq, 0:t, 0:d])
                # Queries are transposed once and read for every block. m, l and limits have one lane per query row.
                queries = T.alloc_buffer((slots, d, width), "float32")
                m = T.alloc_buffer((slots * width,), "float32")
                l = T.alloc_buffer((slots * width,), "float32")  # noqa: E741
                limits = T.alloc_buffer((slots * width,), "int32")
                # One block of keys and values in float32, which all tiles of the item share.
                block_keys = T.alloc_buffer((CHUNK_KEYS, d), "float32")
                block_values = T.alloc_buffer((CHUNK_KEYS, d), "float32")
                weights = T.alloc_buffer((CHUNK_KEYS, width), "float32")
                decay = T.alloc_buffer((width,), "float32")
                o = T.meta_var(ChunkOperands(q, y))
                state = T.meta_var(ChunkState(queries, m, l, limits, block_keys, block_values, weights, decay))
                bi: T.let = item // (hkv * parts)
                h: T.let = item // parts % hkv
                # Part p has the tiles p, p + parts, p + 2 * parts and so on.
                # These are early and late rows, so that all items take equally long.
                part: T.let = item % parts
                mine: T.let = (tiles - part + parts - 1) // parts
                # What the last query row sees. Earlier rows are masked in `attend`.
                seen: T.let = filled_rows(position[0], t - 1, s)
                for slot in range(mine):
                    begin(o, state, Tile(bi, h, (part + slot * parts) * width, slot), position[0])
                # block: keys in order. slot: tiles of the group's query rows, which share the block.
                for block in range((seen + CHUNK_KEYS - 1) // CHUNK_KEYS):
                    start: T.let = block * CHUNK_KEYS
                    filled = T.meta_var(KeyBlock(start, T.min(seen - start, CHUNK_KEYS)))
                    convert(keys, block_keys, (bi, h), filled)
                    convert(values, block_values, (bi, h), filled)
                    for slot in range(mine):
                        # The last row of a tile sees most, but for one that ends within a head.
                        last: T.let = (part + slot * parts) * width % t + width - 1
                        count: T.let = T.min(filled_rows(position[0], T.min(last, t - 1), s) - start, CHUNK_KEYS)
                        # All of the block lies behind the tile's last row: the causal mask skips it.
                        if count > 0:
                            attend(
                                o,
                                state,
                                Tile(bi, h, (part + slot * parts) * width, slot),
                                KeyBlock(start, count),
                            )
                for slot in range(mine):
                    finish(o, state, Tile(bi, h, (part + slot * parts) * width, slot))

    return attend_chunk
