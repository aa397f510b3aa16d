"""The tiles of a prefill chunk's attention, as macros: query rows in the lanes of a vector, keys and values broadcast.

Because lanes are query rows, the softmax needs no sum or maximum across lanes, and no key is transposed. Both products
keep all of their sums in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.decode import filled_rows
from fastcar_compile.codegen.tvm.kernels.attention.logit_rule import LogitRule
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import LOWEST
from fastcar_compile.codegen.tvm.kernels.cache.elements import RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.functions import exp_not_positive
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, ramp, vector_lanes

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
    def isa(self) -> InstructionSet:
        return self.rows_of.isa

    @property
    def total(self) -> int:
        """The query rows of a group: head after head. Row n is row n % t of query head n // t."""
        return self.group * self.t

    @property
    def width(self) -> int:
        """The query rows of a tile: two registers of them, one where there are few."""
        return self.isa.float_lanes * (2 if self.total > self.isa.float_lanes else 1)

    @property
    def tiles(self) -> int:
        """The tiles of a group."""
        return -(-self.total // self.width)

    @property
    def broadcasts(self) -> int:
        """Elements that are broadcast at a time. Their sums with two registers fill half of the registers."""
        return 8 if self.isa.float_lanes == 16 or self.isa.machine == "aarch64" else 4

    @property
    def columns(self) -> int:
        """Columns of the accumulators that are in registers."""
        return next(v for v in (32, 16, 8, 4, 2, 1) if v <= 2 * self.isa.float_lanes and self.d % v == 0)


@dataclass(frozen=True)
class ChunkOperands:
    """Query and result of the kernel; y holds the accumulators until the last block."""

    q: Any
    y: Any


@dataclass(frozen=True)
class ChunkState:
    """Temporaries of one iteration of the parallel loop.

    Attributes:
        queries: float32 [tiles, D, width], the transposed query rows.
        m, l: float32 [tiles * width], running maximum and normaliser.
        limits: int32 [tiles * width], how many cached rows each query row sees.
        keys, values: float32 [32, D], the block.
        weights: float32 [32, width], logits and then exp(logit - m) of one tile. decay: float32 [width].
    """

    queries: Any
    m: Any
    l: Any  # noqa: E741 (the paper's name)
    limits: Any
    keys: Any
    values: Any
    weights: Any
    decay: Any


@dataclass(frozen=True)
class Tile:
    """Query rows of key/value head h of batch row b, from row `first` of the group on. Its state is number `slot`."""

    b: Expr
    h: Expr
    first: Expr
    slot: Expr


@dataclass(frozen=True)
class KeyBlock:
    """The `count` cached rows from row `start` on."""

    start: Expr
    count: Expr


def query_row(shape: ChunkShape, tile: Tile, offset: Expr) -> tuple[Expr, Expr, Expr]:
    """Return the index of a tile's query row `offset`; past the group's last row, of the last one."""
    t = shape.t
    # Whole tiles per head: no tile spans two heads, and the index needs no minimum.
    if t % shape.width == 0:
        return tile.b, tile.h * shape.group + tile.first // t, tile.first % t + offset
    # A tile may span two heads. Lanes past the group's last row hold copies of that row.
    row = T.min(tile.first + offset, shape.total - 1)
    return tile.b, tile.h * shape.group + row // t, row % t


def begin_tile(shape: ChunkShape) -> Callable[..., None]:
    """Return the macro (o, state, tile, position): the tile's transposed query rows, and its empty state."""
    d, width = shape.d, shape.width
    row = partial(query_row, shape)

    def four_rows(o: ChunkOperands, tile: Tile, g: Expr, c: Expr, k: Expr) -> Expr:
        """Return column c + k of four query rows; k is a number."""
        rows = [o.q[(*row(tile, g * QUAD + r), ramp(c, QUAD))] for r in range(QUAD)]
        return T.Shuffle(rows, [r * QUAD + k for r in range(QUAD)])

    @inlined
    def copy_quad(o, state, tile, g, c, k):
        state.queries[tile.slot, c + k, ramp(g * QUAD, QUAD)] = four_rows(o, tile, g, c, k)

    def copy_quads(o: ChunkOperands, state: ChunkState, tile: Tile, g: Expr, c: Expr) -> None:
        for k in range(QUAD):
            copy_quad(o, state, tile, g, c, k)

    @inlined
    def begin(o, state, tile, position):
        # g: four query rows. c: four columns. Four loads and four shuffles transpose 4 x 4 elements.
        for g in range(width // QUAD):
            for c in range(d // QUAD):
                copy_quads(o, state, tile, g, c * QUAD)
        for r in range(width):
            for c in range(d % QUAD):
                state.queries[tile.slot, d // QUAD * QUAD + c, r] = o.q[(*row(tile, r), d // QUAD * QUAD + c)]
            state.limits[tile.slot * width + r] = filled_rows(position, row(tile, r)[2], shape.s)
            state.m[tile.slot * width + r] = T.float32(LOWEST)
            state.l[tile.slot * width + r] = T.float32(0)
            for c in range(d):
                o.y[(*row(tile, r), c)] = T.float32(0)

    return begin


def finish_tile(shape: ChunkShape) -> Callable[..., None]:
    """Return the macro (o, state, tile): the tile's accumulators become results."""
    d, width = shape.d, shape.width
    row = partial(query_row, shape)

    @inlined
    def finish(o, state, tile):
        # Copies of the last row are left out: y is scaled in place, so a second product would be wrong.
        for r in range(T.min(width, shape.total - tile.first)):
            inverse: T.let = T.float32(1) / state.l[tile.slot * width + r]
            for c in range(d):
                o.y[(*row(tile, r), c)] *= inverse

    return finish


def convert_block(shape: ChunkShape) -> Callable[..., None]:
    """Return the macro (rows, converted, (b, h), block): cached rows of head h of batch row b become float32."""
    d, rows_of, lanes = shape.d, shape.rows_of, vector_lanes(shape.d)

    @inlined
    def convert(rows, converted, head, block):
        for j in range(block.count):
            for c in T.unroll(d // lanes):
                for v in T.vectorized(lanes):
                    converted[j, c * lanes + v] = rows_of.element(row_at(rows, *head, block.start + j), c * lanes, v)

    return convert


def attend_tile(shape: ChunkShape) -> Callable[..., None]:
    """Return the macro (o, state, tile, block): the tile's rows meet the block's keys and values."""
    some, parts = shape.broadcasts, shape.width // shape.broadcasts
    multiply, weigh, add_values = _multiply_keys(shape), _weigh(shape), _add_values(shape)

    @inlined
    def attend(o, state, tile, block):
        # piece: the keys whose logits with all rows of the tile fit the registers.
        for piece in range((block.count + some - 1) // some):
            multiply(state, tile, block, piece * some)
        weigh(state, tile, block)
        # part: query rows whose sums are in registers. piece: columns.
        for part in range(parts):
            # A part that lies past the last row has copies only, which would add to that row a second time.
            if tile.first + part * some < shape.total:
                for piece in range(shape.d // shape.columns):
                    add_values(o, state, tile, block, part * some, piece * shape.columns)

    return attend


def _multiply_keys(shape: ChunkShape) -> Callable[..., None]:
    """Return the macro (state, tile, block, j): logits of the tile with the keys from number j of the block on."""
    d, width, half, rule = shape.d, shape.width, shape.broadcasts // 2, shape.rule

    def key(state: ChunkState, block: KeyBlock, j: Expr, c: Expr) -> Expr:
        """Return element c of key j, of the last one for those past it."""
        return state.keys[T.min(j, block.count - 1), c]

    @inlined
    def store(weights, j, sums):
        for r in T.unroll(half):
            for v in T.vectorized(width):
                weights[j + r, v] = rule.logit(sums[r * width + v])

    @inlined
    def multiply(state, tile, block, j):
        # Two buffers: one of all sums has 1024 bytes, and TVM would not keep it on the stack.
        low = T.alloc_buffer((half * width,), "float32")
        high = T.alloc_buffer((half * width,), "float32")
        for v in T.vectorized(width):
            for r in T.unroll(half):
                low[r * width + v] = T.float32(0)
                high[r * width + v] = T.float32(0)
        # Keys are broadcast: with AVX-512 8 keys by two vectors of rows are 16 sums, with AVX2 4 by two are 8.
        # c: the reduction. r: unrolled, keys; low and high are in registers. v: query rows.
        for c in range(d):
            for r in T.unroll(half):
                for v in T.vectorized(width):
                    low[r * width + v] += state.queries[tile.slot, c, v] * key(state, block, j + r, c)
                    high[r * width + v] += state.queries[tile.slot, c, v] * key(state, block, j + half + r, c)
        store(state.weights, j, low)
        store(state.weights, j + half, high)

    return multiply


def _weigh(shape: ChunkShape) -> Callable[..., None]:
    """Return the macro (state, tile, block): the tile's logits become weights; m, l and decay are updated."""
    width = shape.width
    every = ramp(0, width)

    def seen(state: ChunkState, tile: Tile, block: KeyBlock, j: Expr) -> Expr:
        """Return the logits with key j, and the least number for rows that do not see it."""
        number = T.Broadcast(block.start + j, width)
        limits = state.limits[ramp(tile.slot * width, width)]
        return T.Select(number < limits, state.weights[j, every], T.Broadcast(T.float32(LOWEST), width))

    @inlined
    def weigh(state, tile, block):
        m = T.alloc_buffer((width,), "float32")
        l = T.alloc_buffer((width,), "float32")  # noqa: E741
        m[every] = state.m[ramp(tile.slot * width, width)]
        # T.max gives its second operand where one is NaN: a NaN stays a logit, and is no maximum.
        for j in range(block.count):
            state.weights[j, every] = seen(state, tile, block, j)
            m[every] = T.max(state.weights[j, every], m[every])
        # m is never below the old maximum, so the argument is not positive.
        state.decay[every] = exp_not_positive(state.m[ramp(tile.slot * width, width)] - m[every], width)
        l[every] = state.l[ramp(tile.slot * width, width)] * state.decay[every]
        # The sum has one order: key by key, as acc has.
        # Row 0 is in the first block and seen by all, so m is a logit. An unseen key gets exp(-87), which rounds away.
        for j in range(block.count):
            state.weights[j, every] = exp_not_positive(state.weights[j, every] - m[every], width)
            l[every] = l[every] + state.weights[j, every]
        state.m[ramp(tile.slot * width, width)] = m[every]
        state.l[ramp(tile.slot * width, width)] = l[every]

    return weigh


def _add_values(shape: ChunkShape) -> Callable[..., None]:
    """Return the macro (o, state, tile, block, r, column): rows and columns of y are rescaled and get the values."""
    columns, some = shape.columns, shape.broadcasts
    half = some // 2
    row = partial(query_row, shape)

    @inlined
    def rescale(o, state, tile, first, column, acc):
        for r in T.unroll(half):
            for c in T.vectorized(columns):
                acc[r * columns + c] = o.y[(*row(tile, first + r), column + c)] * state.decay[first + r]

    @inlined
    def store(o, tile, first, column, acc):
        for r in T.unroll(half):
            for c in T.vectorized(columns):
                o.y[(*row(tile, first + r), column + c)] = acc[r * columns + c]

    @inlined
    def add_values(o, state, tile, block, first, column):
        low = T.alloc_buffer((half * columns,), "float32")
        high = T.alloc_buffer((half * columns,), "float32")
        rescale(o, state, tile, first, column, low)
        rescale(o, state, tile, first + half, column, high)
        # Weights are broadcast and values are vectors: `broadcasts` times `columns` sums.
        # j: values in order. r: unrolled, query rows; low and high are in registers. c: columns.
        for j in range(block.count):
            for r in T.unroll(half):
                for c in T.vectorized(columns):
                    low[r * columns + c] += state.weights[j, first + r] * state.values[j, column + c]
                    high[r * columns + c] += state.weights[j, first + half + r] * state.values[j, column + c]
        store(o, tile, first, column, low)
        store(o, tile, first + half, column, high)

    return add_values
