"""GEMM of a batch or a prefill chunk with float32 or bfloat16 weights."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, script
from fastcar_compile.codegen.tvm.kernels.linear.active_rows import (
    SCAN_LANES,
    ActiveRows,
    append_active,
    is_zero,
    or_float32,
)
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS, SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.linear.float_tiles import (
    FLOATS,
    Operands,
    Place,
    TileShape,
    multiply_tile,
    pack_step,
)
from fastcar_compile.codegen.tvm.kernels.linear.transpose import transpose_rows
from fastcar_compile.codegen.tvm.kernels.linear.weight_type import WeightType
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr


@kernel
def float_gemm(m: int, n: int, k: int, dtype: WeightType = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w float32 or bfloat16.

    Inactive rows of x are not multiplied. The active rows are moved once, so that a vector holds one column of many
    rows: a weight is one broadcast. Rows beyond the last are computed as copies of it. The order of a row's sum does
    not depend on the other rows. Parallel over panels of weight rows; many rows of x are searched and moved in parallel
    too.
    """
    shape = TileShape.of(m, n, k, dtype, isa)
    rows, groups = shape.panel * shape.rows, -(-m // shape.columns)
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial
    scan = T.parallel if m > SMALL_BATCH and m * k >= PARALLEL_WEIGHTS else T.serial
    move, multiply_panel = _move(k, shape), _multiply_panel(m, n, k, shape)

    @script.prim_func(private=True, s_tir=True)
    def linear_tiles(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), dtype), y: T.Buffer((m, n), "float32")):
        T.func_attr({"op_pattern": OPAQUE})
        with T.sblock("product"):
            T.reads(x[0:m, 0:k], w[0:n, 0:k])
            T.writes(y[0:m, 0:n])
            # A vector of xt has `run` inputs of each of its rows. Zeros pad the inputs to whole steps.
            xt = T.alloc_buffer((groups, shape.steps(k) * shape.width // shape.run, shape.lanes), "float32")
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")
            zero = T.alloc_buffer((m,), "int32")
            # The search is parallel and the list is serial, so that the order of the active rows is fixed.
            for i in scan(m):
                bits = T.alloc_buffer((SCAN_LANES,), "uint32")
                or_float32(x, i, k, bits)
                zero[i] = T.Cast("int32", is_zero(bits))
            count[0] = 0
            for i in range(m):
                if zero[i] != 0:
                    for j in range(n):
                        y[i, j] = T.float32(0)
                else:
                    append_active(ActiveRows(active, count), i)
            for step in scan(shape.steps(k)):
                move(x, xt, ActiveRows(active, count), step)
            # panel: weight rows. packed and sums belong to one iteration, so iterations share no temporary.
            for panel in loop(-(-n // rows)):
                packed = T.alloc_buffer((shape.packed_rows, shape.width), "float32")
                sums = T.alloc_buffer((groups, shape.panel, shape.rows * shape.lanes), "float32")
                multiply_panel(Operands(xt, w, packed, sums, y, ActiveRows(active, count)), panel)

    return linear_tiles


def _move(k: int, shape: TileShape) -> Any:
    """Return the macro (x, xt, active, step): the columns of a step of the active rows of x, to vectors of them."""
    columns, run, width, whole = shape.columns, shape.run, shape.width, k // shape.width
    transposed = columns == FLOATS and shape.dtype == "float32"

    @inlined
    def move_vector(x, xt, active, step, o):
        # i: rows of the vector. c: runs of inputs.
        for i in range(columns):
            # Rows beyond the last are the last one again, so that every vector is full.
            row: T.let = active.rows[T.min(o * columns + i, active.count[0] - 1)]
            for c in range(width // run):
                for e in T.unroll(run):
                    xt[o, step * (width // run) + c, i * run + e] = x[row, step * width + shape.input(c * run + e)]

    @inlined
    def move_tail(x, xt, active, o):
        for i in range(columns):
            row: T.let = active.rows[T.min(o * columns + i, active.count[0] - 1)]
            # Zeros first: inputs past k add nothing.
            for c in range(width):
                xt[o, (whole * width + c) // run, i * run + c % run] = T.float32(0)
            # The tail keeps the plain order of inputs, also for bfloat16, because `pack_step` packs its weights so.
            for c in range(k % width):
                xt[o, (whole * width + c) // run, i * run + c % run] = x[row, whole * width + c]

    @inlined
    def move(x, xt, active, step):
        for o in range((active.count[0] + columns - 1) // columns):
            if k % width > 0 and step == whole:
                move_tail(x, xt, active, o)
            if step < whole:
                # 16 rows by 16 inputs are transposed in registers instead of written one element at a time.
                if transposed:
                    transpose_rows(x, xt, active, o, step)
                else:
                    move_vector(x, xt, active, step, o)

    return move


def _multiply_panel(m: int, n: int, k: int, shape: TileShape) -> Any:
    """Return the macro (o, panel): the products of a panel of weight rows with all active rows."""
    most, blocks = shape.vectors, shape.blocks(k)
    many, one = (multiply_tile(k, replace(shape, vectors=vectors)) for vectors in (most, 1))
    pack, wide = pack_step(k, shape), shape.wide
    widest, is_wide = multiply_tile(k, wide), m > most * shape.columns and shape.run > 1

    def place(panel: Expr, tile: Expr, block: Expr, first: Expr) -> Place:
        # The last tile begins early enough that all its weight rows exist. Its overlap is computed twice, alike.
        j = T.min((panel * shape.panel + tile) * shape.rows, n - shape.rows)
        return Place(j, tile, block, first)

    @inlined
    def pack_panel(o, panel, block):
        for t in range(shape.panel):
            if (panel * shape.panel + t) * shape.rows < n:
                # A block of a tile's weights is packed once for all rows of x.
                for step in range(T.min(shape.block, shape.steps(k) - block * shape.block)):
                    pack(o, place(panel, t, block, 0), block * shape.block + step, t * shape.block + step)

    @inlined
    def for_tiles(o, panel, block, multiply, first):
        for t in range(shape.panel):
            if (panel * shape.panel + t) * shape.rows < n:
                multiply(o, place(panel, t, block, first))

    @inlined
    def multiply_panel(o, panel):
        vectors: T.let = (o.active.count[0] + shape.columns - 1) // shape.columns
        # block: of the reduction. Its sums stay in o.sums until the next block, so the order along k is kept.
        for block in range(blocks):
            if shape.source == "panel":
                pack_panel(o, panel, block)
            # All active rows fit a tile of twice the vectors: every broadcast weight meets all of them at once.
            if is_wide and vectors == wide.vectors:
                for half in range(2):
                    widest(o, Place(T.min(panel * shape.rows, n - shape.rows) + half * wide.rows, 0, 0, 0))
            else:
                # i: tiles of `most` vectors of rows. The vectors that remain are tiles of one.
                for i in range(vectors // most):
                    for_tiles(o, panel, block, many, i * most)
                if most > 1:
                    for i in range(vectors % most):
                        for_tiles(o, panel, block, one, vectors // most * most + i)

    return multiply_panel
