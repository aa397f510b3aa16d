"""Attention of a prefill chunk: many query rows over the filled part of the cache, as two small matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.decode import context_parts, filled_rows
from fastcar_compile.codegen.tvm.kernels.attention.softmax import LOWEST, LogitRule
from fastcar_compile.codegen.tvm.kernels.cache import RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, exp_not_positive, ramp, vector_lanes

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

# The tiles of a prefill chunk's attention, as macros: query rows in the lanes of a vector, keys and values broadcast.
#
# Because lanes are query rows, the softmax needs no sum or maximum across lanes, and no key is transposed. Both
# products keep all of their sums in registers.


CHUNK_KEYS = 32
"""Keys of one block. Keys and values as float32 fit the first-level cache for heads of up to 128."""

QUAD = 4
"""Query rows that are transposed together."""


@dataclass(frozen=True)
class ChunkShape:
    """What is known when the kernel is made.

    Attributes:
        t, s: query rows of a head, rows of the cache. group: query heads of a key/value head.
        rule, rows_of: how logits are made, and how cached rows are read.
    """

    t: int
    s: int
    group: int
    rule: LogitRule
    rows_of: RowFormat

    @property
    def d(self) -> int:
        return self.rows_of.dim

    @property
    def total(self) -> int:
        """The query rows of a group: head after head. Row n is row n % t of query head n // t."""
        return self.group * self.t

    @property
    def width(self) -> int:
        """The query rows of a tile: two registers of them, one where there are few."""
        return self.rows_of.isa.float_lanes * (2 if self.total > self.rows_of.isa.float_lanes else 1)

    @property
    def tiles(self) -> int:
        """The tiles of a group."""
        return -(-self.total // self.width)

    def broadcasts(self, size: int) -> int:
        """Return how many elements meet a vector of `size` at a time: their sums fill half of the registers."""
        isa = self.rows_of.isa
        sums = 16 if isa.float_lanes == 16 or isa.machine == "aarch64" else 8
        return min(sums * isa.float_lanes // size, self.width)

    @property
    def columns(self) -> int:
        """Columns of the accumulators that are in registers."""
        return next(v for v in (32, 16, 8, 4, 2, 1) if v <= 2 * self.rows_of.isa.float_lanes and self.d % v == 0)

    def query_row(self, tile: ChunkTile, offset: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the index of a tile's query row `offset`; past the group's last row, of the last one."""
        t = self.t
        # Whole tiles per head: no tile spans two heads, and the index needs no minimum.
        if t % self.width == 0:
            return tile.b, tile.h * self.group + tile.first // t, tile.first % t + offset
        # A tile may span two heads. Lanes past the group's last row hold copies of that row.
        row = T.min(tile.first + offset, tile.total - 1)
        return tile.b, tile.h * self.group + row // t, row % t

    def sees(self, state: Any, own: Expr, block: KeyBlock, j: Expr) -> Expr:
        """Return which rows of a tile see key j of a block: state.seen[own] has how many cached rows they see."""
        return T.Broadcast(block.start + j, self.width) < state.seen[own]


@dataclass(frozen=True)
class ChunkTile:
    """Query rows of key/value head h of batch row b, from row `first` of the group's `total` on.

    Its state is number `slot`.
    """

    b: Expr
    h: Expr
    first: Expr
    slot: Expr
    total: Expr


@dataclass(frozen=True)
class KeyBlock:
    """The `count` cached rows from row `start` on."""

    start: Expr
    count: Expr


def state_buffers(shape: ChunkShape, slots: int) -> Any:
    """Allocate the temporaries of one iteration of the parallel loop over `slots` tiles."""
    d, width = shape.d, shape.width
    return script.temporaries(
        # Queries are transposed once and read for every block. m, l and seen have one lane per query row.
        queries=(slots, d, width, "float32"),
        m=(slots, width, "float32"),
        l=(slots, width, "float32"),
        # What each query row sees, as `sees` reads it.
        seen=(slots, width, "int32"),
        # One block of keys and values in float32, which all tiles of the item share.
        keys=(CHUNK_KEYS, d, "float32"),
        values=(CHUNK_KEYS, d, "float32"),
        # Logits and then exp(logit - m) of one tile.
        weights=(CHUNK_KEYS, width, "float32"),
        decay=(width, "float32"),
    )


def _four_rows(shape: ChunkShape, q: Any, tile: ChunkTile, g: Expr, c: Expr, k: Expr) -> Expr:
    """Return column c + k of four query rows; k is a number."""
    rows = [q[(*shape.query_row(tile, g * QUAD + r), ramp(c, QUAD))] for r in range(QUAD)]
    return T.Shuffle(rows, [r * QUAD + k for r in range(QUAD)])


@script.inlined
def _copy_quad(shape, q, state, tile, g, c, k, _number):
    state.queries[tile.slot, c + k, ramp(g * QUAD, QUAD)] = _four_rows(shape, q, tile, g, c, k)


@script.inlined
def begin(shape, q, y, state, tile):
    """Write the tile's transposed query rows, and its empty state."""
    # g: four query rows. c: four columns. Four loads and four shuffles transpose 4 x 4 elements.
    for g in range(shape.width // QUAD):
        for c in range(shape.d // QUAD):
            script.each(_copy_quad, range(QUAD), shape, q, state, tile, g, c * QUAD)
    for r in range(shape.width):
        row = T.meta_var(shape.query_row(tile, r))
        for c in range(shape.d % QUAD):
            state.queries[tile.slot, shape.d // QUAD * QUAD + c, r] = q[(*row, shape.d // QUAD * QUAD + c)]
        state.m[tile.slot, r] = T.float32(LOWEST)
        state.l[tile.slot, r] = T.float32(0)
        for c in range(shape.d):
            y[(*row, c)] = T.float32(0)


@script.inlined
def finish(shape, y, state, tile):
    """Turn the tile's accumulators into results."""
    # Copies of the last row are left out: y is scaled in place, so a second product would be wrong.
    for r in range(T.min(shape.width, tile.total - tile.first)):
        inverse: T.let = T.float32(1) / state.l[tile.slot, r]
        for c in range(shape.d):
            y[(*shape.query_row(tile, r), c)] *= inverse


@script.inlined
def convert(rows_of, lanes, rows, converted, head, block):
    """Write cached rows of head h of batch row b, head = (b, h), as float32."""
    for j in range(block.count):
        for c in T.unroll(rows_of.dim // lanes):
            for v in T.vectorized(lanes):
                converted[j, c * lanes + v] = rows_of.element(row_at(rows, *head, block.start + j), c * lanes, v)


@script.inlined
def attend(shape, y, state, tile, block):
    """Add the block's keys and values to what the tile's rows have met."""
    some, rows = T.meta_var((shape.broadcasts(shape.width), shape.broadcasts(shape.columns)))
    # piece: the keys whose logits with all rows of the tile fit the registers.
    for piece in range((block.count + some - 1) // some):
        _multiply_keys(shape, some, state, tile, piece * some)
    _weigh(shape, shape.width, ramp(0, shape.width), (tile.slot, ramp(0, shape.width)), state, block)
    # part: query rows whose sums are in registers. piece: columns.
    for part in range(shape.width // rows):
        # A part that lies past the last row has copies only, which would add to that row a second time.
        if tile.first + part * rows < tile.total:
            for piece in range(shape.d // shape.columns):
                _add_values(shape, rows // 2, y, state, tile, block, part * rows, piece * shape.columns)


@script.inlined
def _clear(width, acc, _r):
    for v in T.vectorized(width):
        acc[v] = T.float32(0)


@script.inlined
def _add_key(width, state, slot, j, c, acc, r):
    for v in T.vectorized(width):
        acc[v] += state.queries[slot, c, v] * state.keys[j + r, c]


@script.inlined
def _store_logits(rule, width, weights, j, acc, r):
    for v in T.vectorized(width):
        weights[j + r, v] = rule.logit(acc[v])


@script.inlined
def _multiply_keys(shape, some, state, tile, j):
    """Write logits of the tile with `some` keys, from number j of the block on; past its end what is there."""
    sums = script.buffers(some, shape.width)
    script.each(_clear, sums, shape.width)
    # Keys are broadcast: with AVX-512 8 keys by two vectors of rows are 16 sums, with AVX2 4 by two are 8.
    # c: the reduction. All sums are in registers.
    for c in range(shape.d):
        script.each(_add_key, sums, shape.width, state, tile.slot, j, c)
    script.each(_store_logits, sums, shape.rule, shape.width, state.weights, j)


@script.inlined
def _weigh(shape, width, every, own, state, block):
    """Turn the tile's logits into weights, and update m, l and decay. own: the tile's part of the state."""
    m, l = script.buffers(2, width)  # noqa: E741
    m[every] = state.m[own]
    # T.max gives its second operand where one is NaN: a NaN stays a logit, and is no maximum.
    for j in range(block.count):
        state.weights[j, every] = T.Select(
            shape.sees(state, own, block, j), state.weights[j, every], T.Broadcast(T.float32(LOWEST), width)
        )
        m[every] = T.max(state.weights[j, every], m[every])
    # m is never below the old maximum, so the argument is not positive.
    state.decay[every] = exp_not_positive(state.m[own] - m[every], width)
    l[every] = state.l[own] * state.decay[every]
    # The sum has one order: key by key, as acc has.
    for j in range(block.count):
        state.weights[j, every] = T.Select(
            shape.sees(state, own, block, j),
            exp_not_positive(state.weights[j, every] - m[every], width),
            T.Broadcast(T.float32(0), width),
        )
        l[every] = l[every] + state.weights[j, every]
    state.m[own] = m[every]
    state.l[own] = l[every]


@script.inlined
def _rescale(shape, half, y, state, tile, first, column, acc, number):
    for r in T.unroll(half):
        at = T.meta_var(first + number * half + r)
        for c in T.vectorized(shape.columns):
            acc[r * shape.columns + c] = y[(*shape.query_row(tile, at), column + c)] * state.decay[at]


@script.inlined
def _store_sums(shape, half, y, tile, first, column, acc, number):
    for r in T.unroll(half):
        for c in T.vectorized(shape.columns):
            y[(*shape.query_row(tile, first + number * half + r), column + c)] = acc[r * shape.columns + c]


@script.inlined
def _add_values(shape, half, y, state, tile, block, first, column):
    """Rescale rows and columns of y from `first` and `column` on, and add the values."""
    # low: sums of the first `half` query rows. high: those of the others.
    low, high = script.buffers(2, half * shape.columns)
    script.each(_rescale, (low, high), shape, half, y, state, tile, first, column)
    # Weights are broadcast and values are vectors: `broadcasts` times `columns` sums.
    # j: values in order. r: unrolled, query rows; low and high are in registers. c: columns.
    for j in range(block.count):
        for r in T.unroll(half):
            for c in T.vectorized(shape.columns):
                low[r * shape.columns + c] += state.weights[j, first + r] * state.values[j, column + c]
                high[r * shape.columns + c] += state.weights[j, first + half + r] * state.values[j, column + c]
    script.each(_store_sums, (low, high), shape, half, y, tile, first, column)


@script.kernel
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
    lanes = vector_lanes(d)

    @script.prim_func(private=True, s_tir=True)
    def attend_chunk(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, size), dtype),
        values: T.Buffer((b, hkv, s, size), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        for item in loop(b * hkv * parts):
            with T.sblock("rows"):
                script.access([q, keys, values, position], [y])
                state = state_buffers(shape, slots)
                bi: T.let = item // (hkv * parts)
                h: T.let = item // parts % hkv
                # Part p has the tiles p, p + parts, p + 2 * parts and so on.
                # These are early and late rows, so that all items take equally long.
                part: T.let = item % parts
                mine: T.let = (tiles - part + parts - 1) // parts
                # What the last query row sees. Earlier rows are masked in `attend`.
                seen: T.let = filled_rows(position[0], t - 1, s)
                for slot in range(mine):
                    begin(shape, q, y, state, ChunkTile(bi, h, (part + slot * parts) * width, slot, shape.total))
                    for r in range(width):
                        own = T.meta_var(
                            shape.query_row(ChunkTile(bi, h, (part + slot * parts) * width, slot, shape.total), r)
                        )
                        state.seen[slot, r] = filled_rows(position[0], own[2], s)
                # block: keys in order. slot: tiles of the group's query rows, which share the block.
                for block in range((seen + CHUNK_KEYS - 1) // CHUNK_KEYS):
                    start: T.let = block * CHUNK_KEYS
                    filled = T.meta_var(KeyBlock(start, T.min(seen - start, CHUNK_KEYS)))
                    convert(shape.rows_of, lanes, keys, state.keys, (bi, h), filled)
                    convert(shape.rows_of, lanes, values, state.values, (bi, h), filled)
                    for slot in range(mine):
                        # The last row of a tile sees most, but for one that ends within a head.
                        last: T.let = (part + slot * parts) * width % t + width - 1
                        count: T.let = T.min(filled_rows(position[0], T.min(last, t - 1), s) - start, CHUNK_KEYS)
                        # All of the block lies behind the tile's last row: the causal mask skips it.
                        if count > 0:
                            tile = T.meta_var(ChunkTile(bi, h, (part + slot * parts) * width, slot, shape.total))
                            attend(shape, y, state, tile, KeyBlock(start, count))
                for slot in range(mine):
                    finish(shape, y, state, ChunkTile(bi, h, (part + slot * parts) * width, slot, shape.total))

    return attend_chunk
