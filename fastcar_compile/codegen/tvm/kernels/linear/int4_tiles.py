"""Tiles of the int4 kernel: exact int32 group sums, times their scales, added in ascending order of the groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.linear.active_rows import Tile, TileMacro
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.linear.int4_dot import HALF, INT4_DOTS, Int4Dot
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import (
    Expr,
    fence,
    fold_fours,
    interleave_fours,
    load_from,
    prefetch,
    prefetch_distance,
    ramp,
    vector,
    vector_of,
)
from fastcar_compile.ops.quant import GROUP

_FLOAT_EXPONENT = 112 << 23
"""Difference of the exponent biases of float32 and float16, in place."""

PAGE = 4096
"""Bytes of the longest row that is one stream."""


@dataclass(frozen=True)
class Int4Operands:
    """x int8 [m, 128 G], s float32 [m], w uint8 [n, 64 G], ws float16 [n, G], y float32 [m, n], and two temporaries.

    x holds the active rows together, padded with zeros. correction int32 [m, G] goes with the rows of x. active
    int32 [m] holds their row numbers in s and y.
    """

    x: Any
    s: Any
    w: Any
    ws: Any
    y: Any
    correction: Any
    active: Any


@dataclass(frozen=True)
class Int4Sizes:
    """x holds `rows` active rows of m; n weight rows of k inputs."""

    rows: int
    m: int
    n: int
    k: int

    @property
    def groups(self) -> int:
        """G."""
        return -(-self.k // GROUP)


@dataclass(frozen=True)
class _Group:
    """One group of one output: weight row j, row i of x, group g."""

    j: Expr
    i: Expr
    g: Expr


def tile_shape(m: int, n: int, k: int, dot: Int4Dot) -> tuple[int, int]:
    """Return weight rows and rows of x of a tile: eight outputs, or one where weights are a single stream."""
    if _one_stream(m, k, dot):
        return 1, 1
    # Eight outputs are two vectors of four, which share the loads of weights and of x.
    columns = 1 if m == 1 else 2 if m < 4 else 4
    return min(8 // columns, n), columns


def tile_macro(sizes: Int4Sizes, isa: InstructionSet) -> TileMacro:
    """Return the macro (Int4Operands, tile) for tiles of at most `tile_shape`."""
    one = _one_stream(sizes.rows, sizes.k, INT4_DOTS[isa.int8])
    return (_groups_in_lanes if one else _rows_in_lanes)(sizes, isa)


def _one_stream(m: int, k: int, dot: Int4Dot) -> bool:
    # Measured: short rows are faster one after the other, longer ones, or those with a remainder, in parallel.
    groups = -(-k // GROUP)
    return m == 1 and dot.streams == 1 and groups % 4 == 0 and groups * HALF <= PAGE


def _float_scales(bits: Expr) -> Expr:
    """Return float32x4 of four float16 bits uint32x4. All are normal, so bits move and the bias changes."""
    # Ten mantissa bits become the upper ones of 23. Scales are positive, so no sign moves.
    moved = T.shift_left(bits, T.Broadcast(T.uint32(13), 4)) + T.Broadcast(T.uint32(_FLOAT_EXPONENT), 4)
    return T.reinterpret("float32x4", moved)


def _scale_bits(scales: Expr, lanes: str = "") -> Expr:
    return T.Cast(f"uint32{lanes}", T.reinterpret(f"uint16{lanes}", scales))


def _four_products(dot: Int4Dot) -> Callable[..., None]:
    """Return the macro (o, groups, correction, scales, products): float(sum - correction) * scale of four groups.

    correction is int32x4, scales uint32x4 holds the bits of four float16, products is float32 [4]. The fence keeps LLVM
    from contracting the product and a later addition into one rounding.
    """
    lanes = dot.lanes

    def group_sums(o: Int4Operands, group: _Group) -> Expr:
        return dot.group(load_from(o.w, [group.j], group.g * HALF), load_from(o.x, [group.i], group.g * GROUP))

    @inlined
    def four(o, groups, correction, scales, products):
        # Four independent group sums hide the latency of the dot products. All three buffers stay in registers.
        acc = T.alloc_buffer((4 * lanes,), "int32")
        pairs = T.alloc_buffer((2 * lanes,), "int32")
        fours = T.alloc_buffer((lanes,), "int32")
        acc[vector(0, lanes)] = group_sums(o, groups[0])
        acc[vector(1, lanes)] = group_sums(o, groups[1])
        acc[vector(2, lanes)] = group_sums(o, groups[2])
        acc[vector(3, lanes)] = group_sums(o, groups[3])
        # One reduction gives four sums in the lanes of one vector.
        interleave_fours([acc[vector(v, lanes)] for v in range(4)], lanes, pairs, fours)
        # A corrected sum is at most 128 * 8 * 127, so its cast to float32 is exact and the product rounds once.
        products[ramp(0, 4)] = fence(
            "float32x4",
            T.Cast("float32x4", fold_fours(load_from(fours, [], 0), lanes) - correction) * _float_scales(scales),
        )

    return four


def _groups_in_lanes(sizes: Int4Sizes, isa: InstructionSet) -> TileMacro:
    """One output per tile: a vector holds four groups of one weight row, which is read as one stream."""
    rows, m, n, groups = sizes.rows, sizes.m, sizes.n, sizes.groups
    padded, packed = groups * GROUP, groups * HALF
    _, bytes_ahead = prefetch_distance(1, packed)
    four = _four_products(INT4_DOTS[isa.int8])

    def four_groups(tile: Tile, first: Expr) -> Sequence[_Group]:
        return [_Group(tile.j, tile.i, first + v) for v in range(4)]

    @inlined
    def multiply(o, tile):
        with T.sblock("tile"):
            T.reads(
                o.x[0:rows, 0:padded], o.s[0:m], o.w[0:n, 0:packed], o.ws[0:n, 0:groups],
                o.correction[0:rows, 0:groups], o.active[0:m],
            )  # fmt: skip
            T.writes(o.y[0:m, 0:n])
            products = T.alloc_buffer((4,), "float32")
            total = T.alloc_buffer((1,), "float32")
            total[0] = T.float32(0)
            # g: four groups at a time. v: unrolled; the sum stays in the order of the groups.
            for g in range(groups // 4):
                # A group's 64 bytes are one cache line of the row, which is a single stream.
                for v in T.unroll(4):
                    T.evaluate(prefetch(o.w[tile.j, (g * 4 + v) * HALF + bytes_ahead]))
                four(
                    o,
                    four_groups(tile, g * 4),
                    o.correction[tile.i, ramp(g * 4, 4)],
                    _scale_bits(o.ws[tile.j, ramp(g * 4, 4)], "x4"),
                    products,
                )
                # Scalar and in turn, because float32 sums depend on the order of the groups.
                for v in T.unroll(4):
                    total[0] += products[v]
            o.y[o.active[tile.i], tile.j] = total[0] * o.s[o.active[tile.i]]

    return multiply


def _rows_in_lanes(sizes: Int4Sizes, isa: InstructionSet) -> TileMacro:
    """Weight rows in parallel, so that a load of activations serves several. A vector holds four outputs."""
    rows, m, n, groups = sizes.rows, sizes.m, sizes.n, sizes.groups
    padded, packed = groups * GROUP, groups * HALF
    rows_ahead, _ = prefetch_distance(tile_shape(rows, n, sizes.k, INT4_DOTS[isa.int8])[0], packed)
    streamed = rows <= SMALL_BATCH
    four = _four_products(INT4_DOTS[isa.int8])

    def four_outputs(tile: Tile, g: Expr, first: Expr) -> Sequence[_Group]:
        # The last quad may not be full: it repeats the last output, whose copies are not stored.
        outputs = [T.min(first + v, tile.outputs - 1) for v in range(4)]
        return [_Group(tile.weight_row(v), tile.active_row(v), g) for v in outputs]

    @inlined
    def add_group(o, tile, g, products, total):
        # p: unrolled, four outputs at a time.
        for p in T.unroll(-(-tile.outputs // 4)):
            four(
                o,
                four_outputs(tile, g, p * 4),
                vector_of([o.correction[at.i, g] for at in four_outputs(tile, g, p * 4)]),
                vector_of([_scale_bits(o.ws[at.j, g]) for at in four_outputs(tile, g, p * 4)]),
                products,
            )
            # Four outputs in lanes: every lane adds its groups in ascending order.
            total[ramp(p * 4, 4)] = total[ramp(p * 4, 4)] + products[ramp(0, 4)]

    @inlined
    def multiply(o, tile):
        with T.sblock("tile"):
            T.reads(
                o.x[0:rows, 0:padded], o.s[0:m], o.w[0:n, 0:packed], o.ws[0:n, 0:groups],
                o.correction[0:rows, 0:groups], o.active[0:m],
            )  # fmt: skip
            T.writes(o.y[0:m, 0:n])
            products = T.alloc_buffer((4,), "float32")
            total = T.alloc_buffer((-(-tile.outputs // 4) * 4,), "float32")
            for p in T.unroll(-(-tile.outputs // 4)):
                total[ramp(p * 4, 4)] = T.Broadcast(T.float32(0), 4)
            # g: groups in ascending order, for all outputs of the tile. total is at most two vectors, in registers.
            for g in range(groups):
                # With many rows of x the first tile brings the weights to the cache: no prefetch is needed.
                if streamed:
                    for v in T.unroll(tile.rows):
                        T.evaluate(prefetch(o.w[tile.j + rows_ahead + v, g * HALF]))
                add_group(o, tile, g, products, total)
            for v in T.unroll(tile.outputs):
                o.y[o.active[tile.active_row(v)], tile.weight_row(v)] = total[v] * o.s[o.active[tile.active_row(v)]]

    return multiply
