"""Register tiles of the GEMM with weights of 32 or 16 bits: a weight is one broadcast for a vector of rows of x."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear.tiles import WeightType
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, Expr, prefetch, ramp, to_float32, vector

FLOATS = 16
"""float32 of a cache line."""

BLOCK = 512
"""Inputs of a block of the reduction."""

WEIGHT_ROWS = 12
"""Weight rows of a tile of one vector of rows of x, and with AVX-512 of two."""

SHARED = 8
"""Rows of x of a vector with two inputs of each."""

Source = Literal["rows", "line", "panel"]
"""Where a tile reads weights: in their rows; in a copy of one cache line of each row; in a copy of a panel's block."""


@dataclass(frozen=True)
class TileShape:
    """A register tile, and the loops around it.

    Args:
        dtype: of the weights.
        lanes: float32 lanes of a vector.
        run: inputs of a row of x beside each other in a vector; lanes / run rows share it.
        vectors: vectors of rows of x. rows: weight rows. ahead: weight rows of the prefetch distance.
        panel: tiles of weight rows that meet a tile of x while both are in the second-level cache. One for few rows of
            x: a weight is read from memory while the products of others are added.
        block: steps of a block of the reduction. The sums of all tiles are put aside after each block but the last.
        source: of the weights. k: inputs. isa: what widens them.
    """

    dtype: WeightType
    lanes: int
    run: int
    vectors: int
    rows: int
    ahead: int
    panel: int
    block: int
    source: Source
    k: int
    isa: InstructionSet

    @classmethod
    def of(cls, m: int, n: int, k: int, dtype: WeightType, isa: InstructionSet) -> TileShape:
        """Return the shape for x [m, k] and w [n, k]: as many sums as registers hold beside what is loaded.

        There are 32 registers with AVX-512 and NEON, otherwise 16. For up to 32 rows of x AVX-512 takes two inputs of
        eight rows: two weights are one broadcast of eight bytes, and the time follows the active rows in eights.
        Measured: with one input, as in `blocks`, 8 to 32 rows take 1.07 to 1.6 times as long.
        """
        lanes = isa.float_lanes
        run = 2 if lanes == 16 and m <= 4 * SHARED and n >= WEIGHT_ROWS else 1
        # Sums of a tile: 2 * 12 vectors of 32 with AVX-512, 4 * 6 of 32 with NEON, 2 * 6 of 16 otherwise.
        most, rows = (2, WEIGHT_ROWS) if lanes == 16 else (4, 6) if isa.machine == "aarch64" else (2, 6)
        vectors = min(most, -(-m * run // lanes))
        rows = min(n, WEIGHT_ROWS if vectors == 1 else rows)
        tiles, width = -(-m * run // (lanes * vectors)), LINE // (4 if dtype == "float32" else 2)
        # Whole cache lines of float32 are read in place: by a copy 32 rows of x take 1.24 times as long. Tails, and 16
        # bits, are widened to one. Three tiles of x or more read weights that often, so a panel's block is packed once.
        panel, block, source = 1, -(-k // width), "rows" if dtype == "float32" and k % width == 0 else "line"
        if tiles > 2:
            panel, block, source = min(8, max(1, n // (rows * 8))), min(BLOCK // width, block), "panel"
        return cls(dtype, lanes, run, vectors, rows, rows, panel, block, source, k, isa)

    @property
    def wide(self) -> TileShape:
        """The tile of twice as many vectors by half as many weight rows: 32 rows of x take 0.79 times as long by it."""
        return replace(self, vectors=2 * self.vectors, rows=self.rows // 2)

    @property
    def columns(self) -> int:
        """Rows of x of a vector."""
        return self.lanes // self.run

    @property
    def width(self) -> int:
        """Inputs of a step: a cache line of a weight row."""
        return FLOATS if self.dtype == "float32" else 2 * FLOATS

    @property
    def packed_rows(self) -> int:
        """Rows of the copy of weights. One of 1024 bytes or less would be on the stack, unaligned."""
        return max(32, self.rows * self.panel * self.block) if self.source == "panel" else 32

    @property
    def steps(self) -> int:
        """Steps of the reduction."""
        return -(-self.k // self.width)

    @property
    def blocks(self) -> int:
        """Blocks of the reduction."""
        return -(-self.steps // self.block)

    def input(self, place: Expr) -> Expr:
        """Return which input of a whole step stands at a place: of bfloat16 first the even, then the odd ones."""
        return place % FLOATS * 2 + place // FLOATS if self.dtype == "bfloat16" else place


# Operands of the macros: w [n, k], y float32 [m, n], the active rows, and temporaries.
#
# xt: float32 [vectors, inputs / run, lanes], the active rows of x, padded with zeros to whole steps.
# packed: float32 [packed_rows, width], weights. sums: float32 [vectors, panel, rows * lanes].


@dataclass(frozen=True)
class TilePlace:
    """Tile `tile` of a panel, its weight rows from j on; a block of the reduction; vectors of x from `first` on."""

    j: Any
    tile: Any
    block: Any
    first: Any


def _bits(shape: TileShape, o: Any, j: Expr, step: Expr) -> Expr:
    return T.reinterpret(f"uint32x{FLOATS}", o.w[j, ramp(step * shape.width, shape.width)])


@script.inlined
def _pack_whole(shape, o, j, step, to):
    if shape.dtype == "float32":
        o.packed[to, ramp(0, FLOATS)] = o.w[j, ramp(step * shape.width, FLOATS)]
    elif shape.dtype == "float16":
        for v in T.vectorized(shape.width):
            o.packed[to, v] = to_float32(o.w[j, step * shape.width + v], shape.dtype, shape.isa)
    else:
        # A 32-bit word holds an even input in its lower half and an odd one in its upper half.
        # A shift and a mask widen both, and no instruction crosses lanes.
        o.packed[to, ramp(0, FLOATS)] = T.reinterpret(
            f"float32x{FLOATS}", T.shift_left(_bits(shape, o, j, step), T.Broadcast(T.uint32(16), FLOATS))
        )
        o.packed[to, ramp(FLOATS, FLOATS)] = T.reinterpret(
            f"float32x{FLOATS}", T.bitwise_and(_bits(shape, o, j, step), T.Broadcast(T.uint32(0xFFFF0000), FLOATS))
        )


@script.inlined
def pack_step(shape, o, place, step, to):
    """Write a step of a tile's weights to o.packed[to * rows ..], as float32."""
    rows, whole, tail = T.meta_var((shape.rows, shape.k // shape.width, shape.k % shape.width))
    # r: unrolled, weight rows. A step is one cache line of each.
    for r in T.unroll(rows):
        if tail == 0 or step < whole:
            _pack_whole(shape, o, place.j + r, step, to * rows + r)
    # The last step, scalar: zeros up to a whole step, in the plain order that `_move_tail` has.
    if tail > 0 and step == whole:
        for r in range(rows):
            for c in range(shape.width):
                o.packed[to * rows + r, c] = T.float32(0)
            for c in range(tail):
                o.packed[to * rows + r, c] = to_float32(
                    o.w[place.j + r, whole * shape.width + c], shape.dtype, shape.isa
                )


@script.inlined
def multiply_tile(shape, o, place):
    """Add a block of the reduction to a register tile."""
    # One buffer per vector of rows of x: each is below 1024 bytes, so LLVM keeps all in registers.
    sums = script.buffers(shape.vectors, shape.rows * shape.lanes)
    script.each(_begin, sums, shape, o, place)
    # step: cache lines of a weight row. c: `run` inputs. r: unrolled, weight rows; all sums are in registers.
    for step in range(T.min(shape.block, shape.steps - place.block * shape.block)):
        _prefetch(shape, o, place, step, int(shape.source == "panel"))
        # One line of every weight row is widened once, for all vectors of the tile.
        if shape.source == "line":
            pack_step(shape, o, place, step, 0)
        for c in range(shape.width // shape.run):
            for r in T.unroll(shape.rows):
                script.each(_add, sums, shape, o, place, step, c, r)
    script.each(_finish, sums, shape, o, place)


@script.inlined
def _begin(shape, o, place, acc, v):
    """Set the sums to those of the blocks before, or to zeros."""
    for r in T.unroll(shape.rows):
        acc[vector(r, shape.lanes)] = T.Broadcast(T.float32(0), shape.lanes)
    # The sums of the block before go on where they stopped, so the order along k does not change.
    if shape.blocks > 1 and place.block > 0:
        for r in T.unroll(shape.rows):
            acc[vector(r, shape.lanes)] = o.sums[place.first + v, place.tile, vector(r, shape.lanes)]


@script.inlined
def _finish(shape, o, place, acc, v):
    """Put the sums aside, or after the last block write y."""
    if shape.blocks == 1 or place.block == shape.blocks - 1:
        _store(shape, o, place, acc, v)
    else:
        for r in T.unroll(shape.rows):
            o.sums[place.first + v, place.tile, vector(r, shape.lanes)] = acc[vector(r, shape.lanes)]


def _weights(shape: TileShape, o: Any, place: TilePlace, step: Expr, r: Expr, c: Expr) -> Expr:
    """Return the weights of run c of a step."""
    if shape.source == "rows":
        return o.w[place.j + r, ramp(step * shape.width + c * shape.run, shape.run)]
    row = r if shape.source == "line" else (place.tile * shape.block + step) * shape.rows + r
    return o.packed[row, ramp(c * shape.run, shape.run)]


def _spread(shape: TileShape, values: Expr) -> Expr:
    """Return `run` weights in turn in all lanes: two are one broadcast of 64 bits."""
    if shape.run == 1:
        return T.Broadcast(values, shape.lanes)
    return T.reinterpret(f"float32x{shape.lanes}", T.Broadcast(T.reinterpret("int64", values), shape.columns))


@script.inlined
def _add(shape, o, place, step, c, r, acc, v):
    """Add the products of weight row r and a vector of x."""
    at = T.meta_var((place.block * shape.block + step) * (shape.width // shape.run) + c)
    x, weights = T.meta_var((o.xt[place.first + v, at, ramp(0, shape.lanes)], _weights(shape, o, place, step, r, c)))
    # One multiply-add: a vector of x from memory, a broadcast weight, and a sum in a register.
    acc[vector(r, shape.lanes)] = acc[vector(r, shape.lanes)] + x * _spread(shape, weights)


@script.inlined
def _prefetch(shape, o, place, step, panel):
    # The next block of a panel, by the first tile of x: the others find the lines in the cache. Else the next tile.
    if panel * place.first == 0:
        for r in T.unroll(shape.rows):
            row = T.meta_var(place.j + r + (1 - panel) * shape.ahead)
            T.evaluate(prefetch(o.w[row, ((place.block + panel) * shape.block + step) * shape.width]))


@script.inlined
def _store(shape, o, place, acc, v):
    """Write the sums of one vector of rows of x to y."""
    # i: rows of the vector. Copies of the last row store the same value again.
    for i in range(shape.columns):
        row: T.let = o.active.rows[T.min((place.first + v) * shape.columns + i, o.active.count[0] - 1)]
        for r in T.unroll(shape.rows):
            if shape.run == 1:
                o.y[row, place.j + r] = acc[r * shape.lanes + i]
            else:
                # Even and odd inputs were summed apart: their sums meet last.
                o.y[row, place.j + r] = acc[r * shape.lanes + i * 2] + acc[r * shape.lanes + i * 2 + 1]
