"""Linears with weights of 32 or 16 bits: dot products along the reduction for a few rows, tiles for many."""

from dataclasses import replace
from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear import tiles
from fastcar_compile.codegen.tvm.kernels.linear.float_tiles import (
    FLOATS,
    TilePlace,
    TileShape,
    multiply_tile,
    pack_step,
)
from fastcar_compile.codegen.tvm.kernels.linear.tiles import PARALLEL_WEIGHTS, SMALL_BATCH, WeightType
from fastcar_compile.codegen.tvm.kernels.vectors import (
    LINE,
    Expr,
    add_lanes,
    prefetch,
    prefetch_distance,
    ramp,
    to_float32,
    vector,
)

ROWS = 4
"""Weight rows read in parallel: independent sums that hide the multiply-add latency, and four memory streams."""


def _weight_rows(m: int, n: int) -> int:
    # Sums are weight rows times rows of x. The more rows of x there are, the fewer streams fit the registers.
    return min(n, ROWS if m <= 2 else 2 if m < SMALL_BATCH else 1)


@script.kernel
def float_gemv(m: int, n: int, k: int, dtype: WeightType = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w of `dtype`, m at most 8.

    While a weight is in a register it meets all rows of x, so weights are streamed once. Where some rows are inactive,
    the others meet the weight one by one while it is in the first-level cache. The order of a row's sum does not depend
    on the other rows. Parallel over weight rows from PARALLEL_WEIGHTS products on.
    """
    tiling = tiles.RowTiling(n, _weight_rows(m, n), m, T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial)
    multiply = _multiply(m, n, k, dtype, isa)

    @script.inlined
    def body(x, w, y):
        o = script.temporaries(q=x, w=w, y=y)
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, tiles.nothing)
        tiles.for_tiles(tiling, multiply, o, active)

    return tiles.float_linear("linear_float", dtype, (m, n, k), body)


def _multiply(m: int, n: int, k: int, dtype: WeightType, isa: InstructionSet) -> Any:
    # A single row of x leaves room for two registers of partial sums per output.
    lanes = 2 * isa.float_lanes if m == 1 else max(isa.float_lanes, 8)
    steps, tail = divmod(k, lanes)
    size = 4 if dtype == "float32" else 2
    (rows_ahead, bytes_ahead), lines = prefetch_distance(_weight_rows(m, n), k * size), -(-lanes * size // LINE)

    @script.inlined
    def prefetch_weights(o, tile, c):
        # r: weight rows. u: cache lines of a step. One of the two distances is 0: that in bytes for several streams,
        # that in rows for a single one.
        for r in T.unroll(tile.rows):
            for u in T.unroll(lines):
                T.evaluate(prefetch(o.w[tile.j + rows_ahead + r, c * lanes + u * (LINE // size) + bytes_ahead // size]))

    @script.inlined
    def add_products(o, tile, acc):
        # c: steps of `lanes` along k. r, i: unrolled, weight rows and rows of x. v: one vector multiply-add; acc is in
        # registers.
        for c in range(steps):
            prefetch_weights(o, tile, c)
            for r in T.unroll(tile.rows):
                for i in T.unroll(tile.columns):
                    for v in T.vectorized(lanes):
                        acc[(r * tile.columns + i) * lanes + v] += o.q[tile.active_row(i), c * lanes + v] * to_float32(
                            o.w[tile.j + r, c * lanes + v], dtype, isa
                        )

    @script.inlined
    def store(o, tile, acc, r, i):
        # The lanes first, then the remainder in order: a row's sum does not depend on the other rows.
        add_lanes(acc, (r * tile.columns + i) * lanes, lanes)
        for t in range(tail):
            acc[(r * tile.columns + i) * lanes] += o.q[tile.active_row(i), steps * lanes + t] * to_float32(
                o.w[tile.j + r, steps * lanes + t], dtype, isa
            )
        o.y[tile.active_row(i), tile.j + r] = acc[(r * tile.columns + i) * lanes]

    @script.inlined
    def multiply(o, tile):
        with T.sblock("tile"):
            script.access([o.q, o.w, tile.active.rows], [o.y])
            # At most 14 vectors of sums: below 1024 bytes, so they are on the stack and LLVM keeps them in registers.
            acc = T.alloc_buffer((tile.outputs * lanes,), "float32")
            for r in T.unroll(tile.outputs):
                for v in T.vectorized(lanes):
                    acc[r * lanes + v] = T.float32(0)
            add_products(o, tile, acc)
            for r in T.unroll(tile.rows):
                for i in T.unroll(tile.columns):
                    store(o, tile, acc, r, i)

    return multiply


# GEMM of a batch or a prefill chunk. First its rows of x: sixteen rows of float32 are transposed in registers.


LANES = 16
HALF = LANES // 2


def _zip(low: Any, high: Any, number: Expr, half: int) -> Expr:
    """Return the lanes of one half of two vectors in turn: of vector `number` of both buffers."""
    lanes = range(half * HALF, half * HALF + HALF)
    order = [which * LANES + lane for lane in lanes for which in (0, 1)]
    return T.Shuffle([low[vector(number, LANES)], high[vector(number, LANES)]], order)


@script.inlined
def _round(low, high, first, second):
    """Zip vectors 0 to 7 (low) with 8 to 15 (high); the results are `first` and `second`, eight each."""
    for p in T.unroll(4):
        first[vector(2 * p, LANES)] = _zip(low, high, p, 0)
        first[vector(2 * p + 1, LANES)] = _zip(low, high, p, 1)
        second[vector(2 * p, LANES)] = _zip(low, high, 4 + p, 0)
        second[vector(2 * p + 1, LANES)] = _zip(low, high, 4 + p, 1)


@script.inlined
def transpose(load, store):
    """Transpose 16 vectors of 16 lanes, load(i), in registers, and call store(i, vector) with the results.

    Four rounds do it. A buffer of all vectors would be too large for registers.
    """
    a, b, c, d = script.buffers(4, HALF * LANES)
    for i in T.unroll(HALF):
        a[vector(i, LANES)] = load(i)
        b[vector(i, LANES)] = load(HALF + i)
    # A round interleaves vector i with vector i + 8. Four rounds exchange the numbers of vectors and of lanes.
    _round(a, b, c, d)
    _round(c, d, a, b)
    _round(a, b, c, d)
    _round(c, d, a, b)
    for i in T.unroll(HALF):
        store(i, a[vector(i, LANES)])
        store(HALF + i, b[vector(i, LANES)])


@script.kernel
def float_gemm(m: int, n: int, k: int, dtype: WeightType = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w of `dtype`.

    Inactive rows of x are not multiplied. The active rows are moved once, so that a vector holds one column of many
    rows: a weight is one broadcast. Rows beyond the last are computed as copies of it. The order of a row's sum does
    not depend on the other rows. Parallel over panels of weight rows; many rows of x are searched and moved in parallel
    too.
    """
    shape = TileShape.of(m, n, k, dtype, isa)
    rows, groups = shape.panel * shape.rows, -(-m // shape.columns)
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial
    scan = T.parallel if m > SMALL_BATCH and m * k >= PARALLEL_WEIGHTS else T.serial
    wide = shape.wide if m > shape.vectors * shape.columns and shape.run > 1 else None

    @script.inlined
    def body(x, w, y):
        # A vector of xt has `run` inputs of each of its rows. Zeros pad the inputs to whole steps.
        xt = T.alloc_buffer((groups, shape.steps * shape.width // shape.run, shape.lanes), "float32")
        active = tiles.active_rows(m)
        o = script.temporaries(q=x, y=y)
        tiles.find_active(o, (m, n, k), active, tiles.nothing, scan)
        for step in scan(shape.steps):
            _move(shape, x, xt, active, step)
        # panel: weight rows. packed and sums belong to one iteration, so iterations share no temporary.
        for panel in loop(-(-n // rows)):
            o = script.temporaries(
                xt=xt,
                w=w,
                y=y,
                active=active,
                packed=(shape.packed_rows, shape.width, "float32"),
                sums=(groups, shape.panel, shape.rows * shape.lanes, "float32"),
            )
            _multiply_panel(n, shape, wide, o, panel)

    return tiles.float_linear("linear_tiles", dtype, (m, n, k), body)


@script.inlined
def _move_vector(shape, x, xt, active, step, o):
    # i: rows of the vector. c: runs of inputs.
    for i in range(shape.columns):
        # Rows beyond the last are the last one again, so that every vector is full.
        row: T.let = active.rows[T.min(o * shape.columns + i, active.count[0] - 1)]
        for c in range(shape.width // shape.run):
            for e in T.unroll(shape.run):
                xt[o, step * (shape.width // shape.run) + c, i * shape.run + e] = x[
                    row, step * shape.width + shape.input(c * shape.run + e)
                ]


@script.inlined
def _move_tail(shape, run, first, x, xt, active, o):
    for i in range(shape.columns):
        row: T.let = active.rows[T.min(o * shape.columns + i, active.count[0] - 1)]
        # Zeros first: inputs past k add nothing.
        for c in range(shape.width):
            xt[o, (first + c) // run, i * run + c % run] = T.float32(0)
        # The tail keeps the plain order of inputs, also for bfloat16, because `pack_step` packs its weights so.
        for c in range(shape.k % shape.width):
            xt[o, (first + c) // run, i * run + c % run] = x[row, first + c]


@script.inlined
def _move(shape, x, xt, active, step):
    """Write the columns of a step of the active rows of x to vectors of them."""
    whole = T.meta_var(shape.k // shape.width)
    for o in range((active.count[0] + shape.columns - 1) // shape.columns):
        if shape.k % shape.width > 0 and step == whole:
            _move_tail(shape, shape.run, whole * shape.width, x, xt, active, o)
        if step < whole:
            # 16 rows by 16 inputs are transposed in registers instead of written one element at a time.
            if shape.columns == FLOATS and shape.dtype == "float32":
                transpose(partial(_line, x, active, o, step), partial(_put, xt, o, step))
            else:
                _move_vector(shape, x, xt, active, step, o)


def _line(x: Any, active: Any, block: Expr, step: Expr, i: Expr) -> Expr:
    return x[active.rows[T.min(block * LANES + i, active.count[0] - 1)], ramp(step * LANES, LANES)]


def _put(xt: Any, block: Expr, step: Expr, i: Expr, value: Expr) -> None:
    T.buffer_store(xt, value, [block, step * LANES + i, ramp(0, LANES)])


def _place(n: int, shape: TileShape, panel: Expr, tile: Expr, block: Expr, first: Expr) -> TilePlace:
    # The last tile begins early enough that all its weight rows exist. Its overlap is computed twice, alike.
    j = T.min((panel * shape.panel + tile) * shape.rows, n - shape.rows)
    return TilePlace(j, tile, block, first)


@script.inlined
def _pack_panel(n, shape, o, panel, block):
    for t in range(shape.panel):
        if (panel * shape.panel + t) * shape.rows < n:
            # A block of a tile's weights is packed once for all rows of x.
            for step in range(T.min(shape.block, shape.steps - block * shape.block)):
                place = T.meta_var(_place(n, shape, panel, t, block, 0))
                pack_step(shape, o, place, block * shape.block + step, t * shape.block + step)


@script.inlined
def _multiply_tiles(n, shape, vectors, o, panel, block, first):
    for t in range(shape.panel):
        if (panel * shape.panel + t) * shape.rows < n:
            multiply_tile(replace(shape, vectors=vectors), o, _place(n, shape, panel, t, block, first))


@script.inlined
def _multiply_panel(n, shape, wide, o, panel):
    """Multiply a panel of weight rows with all active rows. wide: for all of x in one tile, where that is possible."""
    most = T.meta_var(shape.vectors)
    vectors: T.let = (o.active.count[0] + shape.columns - 1) // shape.columns
    # block: of the reduction. Its sums stay in o.sums until the next block, so the order along k is kept.
    for block in range(shape.blocks):
        if shape.source == "panel":
            _pack_panel(n, shape, o, panel, block)
        # All active rows fit a tile of twice the vectors: every broadcast weight meets all of them at once.
        if wide is not None and vectors == wide.vectors:
            for half in range(2):
                first = T.meta_var(T.min(panel * shape.rows, n - shape.rows) + half * wide.rows)
                multiply_tile(wide, o, TilePlace(first, 0, 0, 0))
        else:
            # i: tiles of `most` vectors of rows. The vectors that remain are tiles of one.
            for i in range(vectors // most):
                _multiply_tiles(n, shape, most, o, panel, block, i * most)
            if most > 1:
                for i in range(vectors % most):
                    _multiply_tiles(n, shape, 1, o, panel, block, vectors // most * most + i)
