"""A tile of exact attention of several rows: 16 or 32 query rows, which are the lanes of all vectors."""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.attention.exact_shape import LANES, ExactShape, Int16Dot, dot_of
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, ramp, vector, vector_lanes
from fastcar_compile.ir.ops.operator import BLOCK

ROWS = ramp(0, BLOCK)
"""All rows of a block."""

SUMS = 8
"""Registers of sums of 16 query rows."""


@dataclass(frozen=True)
class ExactTile:
    """Some of the `total` query rows of a key/value head: row after row of the active ones, all `group` heads of each.

    There are `lanes` from number `first` on; those past the last one are copies of it. An int32 has `dot.pair` factors
    of a product.
    """

    lanes: int
    shape: ExactShape
    active: Any
    video: Expr
    rows: Expr
    h: Expr
    group: int
    first: Expr
    total: Expr

    @property
    def all(self) -> Expr:
        """All lanes of a vector."""
        return ramp(0, self.lanes)

    def every(self, value: Expr) -> Expr:
        """Return a number in all lanes."""
        return T.Broadcast(value, self.lanes)

    def number(self, lane: Expr) -> Expr:
        """Return the place among the active rows."""
        return T.min(self.first + lane, self.total - 1) // self.group

    def query_row(self, lane: Expr) -> tuple[Expr, Expr, Expr]:
        head = T.min(self.first + lane, self.total - 1) % self.group
        return self.rows + self.active.rows[self.number(lane)], self.h * self.group + head, 0

    def cached(self, j: Expr, c: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """Return the index of columns of a cached row. What is past the last one, no row sees: it is the last one."""
        return self.video, self.h, T.min(j, self.shape.s - 1), c

    def width(self, e: Expr) -> Expr:
        """Return the columns of a block."""
        return BLOCK if self.shape.d % BLOCK == 0 else T.min(BLOCK, self.shape.d - e * BLOCK)

    @property
    def dot(self) -> Int16Dot:
        """How products are added; a step is one register."""
        return dot_of(self.shape.isa, self.shape.d, self.shape.isa.float_lanes)

    @property
    def run(self) -> int:
        """Columns that are widened together."""
        return vector_lanes(self.shape.d)

    @property
    def registers(self) -> int:
        """Registers that have a lane for each query row there may be; lanes beyond have no products."""
        return -(-min(self.lanes, int(self.active.rows.shape[0]) * self.group) // self.dot.lanes)

    @property
    def columns(self) -> int:
        """Columns of values whose sums are in registers; divides every block."""
        most = SUMS * self.lanes // LANES
        return next(v for v in (8, 4, 2, 1) if v * self.registers <= most and self.shape.d % v == 0)

    @property
    def keys(self) -> int:
        """Keys whose sums are in registers. So are their logits: without AVX-512 there are few registers for both."""
        return SUMS if self.dot.lanes == LANES else SUMS // 2 // self.registers


@script.inlined
def read_exponents(tile, cache, own, start, k):
    """Write the exponents of row k of the block of cached rows from `start` on."""
    for e in T.unroll(tile.shape.blocks):
        own.others[e, k] = T.Cast("int32", cache[tile.cached(start + k, tile.shape.d + e)])


@script.inlined
def find_ranges(tile, seen, own):
    """Write the ranges of cached rows that each lane sees."""
    for r in range(tile.lanes):
        for n in T.unroll(seen.begin.shape[1]):
            own.begin[n, r] = seen.begin[tile.number(r), n]
            own.end[n, r] = seen.end[tile.number(r), n]


def _from(tile: ExactTile, places: Expr) -> Expr:
    """Return the bits from number `places` on: none from 32 on, all up to 0."""
    bits = T.shift_left(
        tile.every(T.int32(-1)), T.bitwise_and(T.max(places, tile.every(T.int32(0))), tile.every(T.int32(BLOCK - 1)))
    )
    return T.Select(places < tile.every(T.int32(BLOCK)), bits, tile.every(T.int32(0)))


@script.inlined
def see(tile, own, block):
    """Write which rows of a block each lane sees."""
    own.power[tile.all] = tile.every(T.int32(0))
    for n in T.unroll(own.begin.shape[0]):
        own.power[tile.all] = T.bitwise_or(
            own.power[tile.all],
            T.bitwise_xor(
                _from(tile, own.begin[n, tile.all] - tile.every(block * BLOCK)),
                _from(tile, own.end[n, tile.all] - tile.every(block * BLOCK)),
            ),
        )
    own.seen[block, tile.all] = own.power[tile.all]


@script.inlined
def multiply(tile, own, count, factors, steps, cached):
    """Write `count` sums of `steps` products, of a lane for each query row with numbers of own.cached, to own.sums.

    factors: (buffer, row of the first). cached: (place of the first, from one step to the next, from one sum to it).
    """
    sums = T.meta_var(own.sums[:count])
    script.each(_clear, sums, tile)
    for i in range(steps):
        script.each(_add_product, sums, tile, own, (factors[0], factors[1] + i), (cached[0] + i * cached[1], cached[2]))


@script.inlined
def _clear(tile, sums, _u):
    sums[tile.all] = tile.every(T.int32(0))


@script.inlined
def _add_product(tile, own, factors, cached, sums, u):
    lanes = T.meta_var(tile.dot.lanes)
    for v in T.unroll(tile.registers):
        sums[vector(v, lanes)] = tile.dot.add(
            sums[vector(v, lanes)],
            factors[0][factors[1], vector(v, lanes)],
            T.Broadcast(own.cached[cached[0] + u * cached[1]], lanes),
        )


def tile_buffers(shape: ExactShape, lanes: int, pair: int, ranges: int) -> Any:
    """Allocate the temporaries of a tile: a lane for each query row. An int32 has `pair` factors."""
    held, n = -(-shape.s // BLOCK), shape.blocks
    return script.temporaries(
        # The query rows, and their wide blocks.
        query=(shape.d, lanes, "float32"),
        mantissas=(shape.d // pair, lanes, "int32"),
        exponents=(n, lanes, "int32"),
        # The largest magnitude of a row's logits as bits, its largest logit, and the sum of its numerators.
        unknown=(lanes, "int32"),
        most=(lanes, "float32"),
        count=(lanes, "int64"),
        # The ranges of cached rows that a lane sees.
        begin=(ranges, lanes, "int32"),
        end=(ranges, lanes, "int32"),
        # The powers of two of the wide blocks, those of a block of keys, and the ranges of the exponents of both.
        powers=(n, lanes, "float32"),
        key_powers=(n, BLOCK, "float32"),
        least=(2, "int32"),
        largest=(2, "int32"),
        # Of all cached rows: the logits, and which of a block each lane sees, as bits.
        logits=(held * BLOCK, lanes, "float32"),
        seen=(held, lanes, "int32"),
        # A block of cached rows: factors, exponents, and what multiplies logits or numerators.
        cached=(BLOCK * shape.d // pair, "int32"),
        others=(n, BLOCK, "int32"),
        factors=(BLOCK, "float32"),
        # Its logits in fixed point, numerators, and these scaled, and as wide blocks.
        units=(BLOCK * lanes, "int32"),
        weights=(BLOCK, lanes, "float32"),
        scaled=(BLOCK, lanes, "float32"),
        integers=(BLOCK // pair, lanes, "int32"),
        # In registers.
        sums=script.buffers(SUMS, lanes, "int32"),
        totals=script.buffers(SUMS, lanes),
        top=(lanes, "int32"),
        power=(lanes, "int32"),
        low=(lanes, "int32"),
        high=(lanes, "int32"),
        # The weighted values, and where a block of columns is NaN.
        out=(shape.d, lanes, "float32"),
        columns=(n, lanes, "int32"),
    )
