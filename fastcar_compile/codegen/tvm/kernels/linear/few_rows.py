"""Products of a few rows of x with int8 or int4 weights: dot products along the reduction, exact in int32.

The active rows of x are moved together. A tile is some weight rows by some of them; `dots` says how their vectors meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet, Int8
from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.linear import tiles
from fastcar_compile.codegen.tvm.kernels.linear.dots import DOTS, HALF, Dot
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, fence, load_from, ramp, vector
from fastcar_compile.ir.ops.linear import GROUP


@dataclass(frozen=True)
class FewRows:
    """At most `rows` active rows by n weight rows of k inputs."""

    kind: Literal["int8", "int4"]
    rows: int
    n: int
    k: int
    int8: Int8

    @property
    def dot(self) -> Dot:
        """How products are added."""
        return DOTS[self.kind][self.int8]

    @property
    def groups(self) -> int:
        """Sums of an output, each with a scale of its own."""
        return -(-self.k // GROUP) if self.kind == "int4" else 1

    @property
    def inputs(self) -> int:
        """Inputs of a row that is moved: of int4 whole groups, so that no tile has a remainder along k."""
        return self.groups * GROUP if self.kind == "int4" else self.k

    @property
    def steps(self) -> int:
        """Whole steps of a group."""
        return self.inputs // self.groups // self.dot.width

    @property
    def shape(self) -> tuple[int, int]:
        """Weight rows and rows of x of a tile, so that the fewest tiles of int8 cover the rows; eight outputs of int4.

        Eight outputs are two vectors of four, which share the loads of weights and of x.
        """
        if self.kind == "int4":
            columns = 1 if self.rows == 1 else 2 if self.rows < 4 else 4
            return min(8 // columns, self.n), columns
        if self.rows == 1 or (self.rows == 2 and self.dot.streams == 1):
            return min(self.dot.streams, self.n), self.rows
        columns = -(-self.rows // -(-self.rows // self.dot.columns))
        return min(4, self.dot.accumulators // columns, self.n), columns

    @property
    def ahead(self) -> tuple[int, int] | None:
        """The prefetch distance in weight rows and bytes. With many rows of x the first tile brings the weights."""
        size = self.groups * HALF if self.kind == "int4" else self.k
        return vectors.prefetch_distance(self.shape[0], size) if self.rows <= tiles.SMALL_BATCH else None

    def temporaries(self) -> dict[str, Any]:
        """Return what a kernel allocates: active rows side by side, and what unsigned weights add to their sums."""
        return {"x": (self.rows, self.inputs, self.dot.moved), "correction": (self.rows, self.groups, "int32")}


@script.kernel
def linear_few(kind: Literal["int8", "int4"], m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = sum_g float(sum_k q[m, k] * w[n, k]) * scales, q int8 [m, k], s float32 [m], y float32 [m, n].

    int8: w int8 [n, k], ws float32 [n], one group, times s[m] * ws[n]. int4: w uint8 [n, 64 G] (`ir.ops.linear.
    pack_int4`), ws float16 [n, G], each group of 128 inputs times ws[n, g], in ascending order, their sum times s[m].

    Inactive rows are not multiplied. Parallel over tiles of weight rows. Such a tile stays in the first-level cache
    while all rows of q pass, so weights are read from memory once. The bias is added by another kernel: LLVM would
    contract the last product and the addition into one rounding.
    """
    f = FewRows(kind, m, n, k, isa.int8)
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial

    @script.inlined
    def body(q, s, w, ws, y):
        o = script.temporaries(q=q, s=s, w=w, ws=ws, y=y, **f.temporaries())
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, partial(move_row, f))
        multiply(f, loop, o, active)

    return tiles.integer_linear(kind, "", (m, n, k), body)


@script.inlined
def multiply(f, loop, o, active):
    """Write the products of the active rows, which were moved. loop: T.parallel or T.serial."""
    tiling = T.meta_var(tiles.RowTiling(f.n, f.shape[0], f.shape[1], loop, together=f.kind == "int8"))
    tiles.for_tiles(tiling, partial(_int8_tile if f.kind == "int8" else _int4_tile, f), o, active)


@script.inlined
def move_row(f, o, i, to):
    """Move row i of o.q to row `to` of o.x; o.correction[to] becomes what unsigned weights add to its sums, or 0."""
    for t in range(f.k):
        o.x[to, t] = T.Cast(f.dot.moved, o.q[i, t])
    # Zeros up to a whole group add nothing, whatever the weights are.
    for t in range(f.inputs - f.k):
        o.x[to, f.k + t] = T.Cast(f.dot.moved, 0)
    for g in range(f.groups):
        if f.dot.unsigned:
            acc = T.alloc_buffer((f.dot.lanes,), "int32")
            acc[vector(0, f.dot.lanes)] = T.Broadcast(0, f.dot.lanes)
            # Whole steps only: the remainder of a row is multiplied with signed weights and needs no correction.
            for c in range(f.steps):
                acc[vector(0, f.dot.lanes)] = f.dot.step(
                    acc[vector(0, f.dot.lanes)],
                    partial(_zeros, f.kind),
                    load_from(o.x, [to], g * GROUP + c * f.dot.width),
                )
            o.correction[to, g] = vectors.reduce_add(acc[vector(0, f.dot.lanes)], f.dot.lanes)
        else:
            o.correction[to, g] = 0


def _zeros(kind: str, _offset: int, size: int) -> Expr:
    return T.Broadcast(T.int8(0) if kind == "int8" else T.uint8(0), size)


# int8: the sums of all outputs of a tile are in registers.


@script.inlined
def _clear(lanes, columns, acc, _r):
    for i in T.unroll(columns):
        acc[vector(i, lanes)] = T.Broadcast(0, lanes)


@script.inlined
def _add_row(dot, o, tile, c, acc, r):
    for i in T.unroll(tile.columns):
        acc[vector(i, dot.lanes)] = dot.step(
            acc[vector(i, dot.lanes)],
            load_from(o.w, [tile.j + r], c * dot.width),
            load_from(o.x, [tile.i + i], c * dot.width),
        )


@script.inlined
def _finish_four(f, o, tile, accs, t, i, first, _number):
    """Write the outputs of up to four weight rows from number `first` of the tile on with its active row i."""
    # The last vector stands for those that do not exist.
    four = T.meta_var([accs[min(first + v, tile.rows - 1)][vector(i, f.dot.lanes)] for v in range(4)])
    vectors.interleave_fours(four, f.dot.lanes, t.pairs, t.fours)
    t.sums[ramp(0, 4)] = vectors.fold_fours(load_from(t.fours, [], 0), f.dot.lanes)
    row: T.let = tile.active_row(i)
    whole, count = T.meta_var((f.steps * f.dot.width, min(4, tile.rows - first)))
    for c in range(f.k - whole):
        for v in T.unroll(count):
            t.sums[v] += T.Cast("int32", o.x[tile.i + i, whole + c]) * T.Cast(
                "int32", o.w[tile.j + first + v, whole + c]
            )
    # The scales are multiplied first: the order of the definition decides the rounding.
    for v in T.vectorized(count):
        o.y[row, tile.j + first + v] = T.Cast("float32", t.sums[v] - o.correction[tile.i + i, 0]) * (
            o.s[row] * o.ws[tile.j + first + v]
        )


@script.inlined
def _int8_tile(f, o, tile):
    """Write the outputs of a tile."""
    with T.sblock("tile"):
        script.access([o.x, o.s, o.w, o.ws, o.correction, tile.active.rows], [o.y])
        # One buffer for each weight row, a vector for each active row.
        accs = script.buffers(tile.rows, tile.columns * f.dot.lanes, "int32")
        t = script.temporaries(pairs=(2 * f.dot.lanes, "int32"), fours=(f.dot.lanes, "int32"), sums=(4, "int32"))
        script.each(_clear, accs, f.dot.lanes, tile.columns)
        # c: steps of `width` along k.
        for c in range(f.steps):
            if f.ahead is not None:
                for v in T.unroll(tile.rows):
                    T.evaluate(vectors.prefetch(o.w[tile.j + f.ahead[0] + v, c * f.dot.width + f.ahead[1]]))
            script.each(_add_row, accs, f.dot, o, tile, c)
        for i in T.unroll(tile.columns):
            script.each(_finish_four, range(0, tile.rows, 4), f, o, tile, accs, t, i)


# int4: exact int32 sums of a group, four outputs at a time, times their scales, added in ascending order of the groups.


_FLOAT_EXPONENT = 112 << 23
"""Difference of the exponent biases of float32 and float16, in place."""


def _float_scales(scales: Sequence[Expr]) -> Expr:
    """Return float32x4 of four float16. All are normal, so bits move and the bias changes."""
    bits = vectors.vector_of([T.Cast("uint32", T.reinterpret("uint16", scale)) for scale in scales])
    # Ten mantissa bits become the upper ones of 23. Scales are positive, so no sign moves.
    moved = T.shift_left(bits, T.Broadcast(T.uint32(13), 4)) + T.Broadcast(T.uint32(_FLOAT_EXPONENT), 4)
    return T.reinterpret("float32x4", moved)


@script.inlined
def _add_four(f, o, tile, g, total, t, first, _number):
    """Add float(sum - correction) * scale of four outputs of group g to the totals: every lane adds its groups."""
    # The last quad may not be full: it repeats the last output, whose copies are not stored.
    outputs, lanes = T.meta_var(([min(first + v, tile.outputs - 1) for v in range(4)], f.dot.lanes))
    # Four independent sums hide the latency of the dot products. All buffers stay in registers.
    script.each(_group_sum, outputs, f.dot, o, tile, g, t.acc)
    # One reduction gives four sums in the lanes of one vector.
    vectors.interleave_fours([t.acc[vector(v, lanes)] for v in range(4)], lanes, t.pairs, t.fours)
    # A corrected sum is at most 128 * 8 * 127, so its cast to float32 is exact and the product rounds once: the fence
    # keeps LLVM from contracting it with the addition.
    correction = T.meta_var(vectors.vector_of([o.correction[tile.place(v), g] for v in outputs]))
    total[ramp(first, 4)] = total[ramp(first, 4)] + fence(
        "float32x4",
        T.Cast("float32x4", vectors.fold_fours(load_from(t.fours, [], 0), lanes) - correction)
        * _float_scales([o.ws[tile.weight_row(v), g] for v in outputs]),
    )


@script.inlined
def _group_sum(dot, o, tile, g, acc, output, v):
    acc[vector(v, dot.lanes)] = dot.step(
        T.Broadcast(0, dot.lanes),
        load_from(o.w, [tile.weight_row(output)], g * HALF),
        load_from(o.x, [tile.place(output)], g * GROUP),
    )


@script.inlined
def _int4_tile(f, o, tile):
    """Write the outputs of a tile. A load of activations serves several weight rows; a vector holds four outputs."""
    with T.sblock("tile"):
        script.access([o.x, o.s, o.w, o.ws, o.correction, tile.active.rows], [o.y])
        fours, lanes = T.meta_var((range(0, tile.outputs, 4), f.dot.lanes))
        total = T.alloc_buffer((4 * len(fours),), "float32")
        t = script.temporaries(acc=(4 * lanes, "int32"), pairs=(2 * lanes, "int32"), fours=(lanes, "int32"))
        for p in T.unroll(len(fours)):
            total[ramp(p * 4, 4)] = T.Broadcast(T.float32(0), 4)
        # g: groups in ascending order, for all outputs of the tile. total is at most two vectors, in registers.
        for g in range(f.groups):
            if f.ahead is not None:
                for v in T.unroll(tile.rows):
                    T.evaluate(vectors.prefetch(o.w[tile.j + f.ahead[0] + v, g * HALF]))
            script.each(_add_four, fours, f, o, tile, g, total, t)
        for v in T.unroll(tile.outputs):
            o.y[tile.active_row(v), tile.weight_row(v)] = total[v] * o.s[tile.active_row(v)]
