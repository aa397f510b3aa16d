"""Products of many rows of x, rounded to bfloat16, with bfloat16 weights; sums are float32. For AVX-512 and AMX.

A 32-bit lane is two inputs of a row of x. The active rows are moved once, so that a vector holds two inputs of 16 rows.
With vdpbf16ps two inputs of a weight row are broadcast to it. For AMX 16 such vectors are a tile, and so is a step of
16 weight rows.
"""

from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear import floats, tiles
from fastcar_compile.codegen.tvm.kernels.linear.tiles import LANES, PANEL_ROWS, SUMS, WEIGHT_ROWS, Place
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, ramp, vector

PAIR = 2
"""Inputs of a lane."""

STEP = PAIR * LANES
"""Inputs of a step: a cache line of a weight row."""

_DOT, _ROUND = "fastcar_dot_bfloat16", "fastcar_round_bfloat16"
BRIDGE = f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @{_DOT}(<16 x float> %sum, <16 x float> %x, <16 x float> %w) {{
  %a = bitcast <16 x float> %x to <32 x bfloat>
  %b = bitcast <16 x float> %w to <32 x bfloat>
  %y = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %y
}}
define <16 x float> @{_ROUND}(<16 x float> %low, <16 x float> %high) {{
  %a = fptrunc <16 x float> %low to <16 x bfloat>
  %b = fptrunc <16 x float> %high to <16 x bfloat>
  %c = shufflevector <16 x bfloat> %a, <16 x bfloat> %b, <32 x i32> <{", ".join(f"i32 {i}" for i in range(32))}>
  %y = bitcast <32 x bfloat> %c to <16 x float>
  ret <16 x float> %y
}}
"""
"""TVM has no values of LLVM's type bfloat, which the intrinsic takes."""


def dot(sums: Expr, x: Expr, w: Expr) -> Expr:
    """Return sums float32 [16] plus two products each; x and w: bfloat16 [32] as float32 [16]."""
    return T.call_pure_extern(f"float32x{LANES}", _DOT, sums, x, w)


def multiplies(n: int, k: int, isa: InstructionSet) -> bool:
    """Return whether `gemm_bfloat16` takes n weight rows of k inputs."""
    return isa.bfloat16 in ("vdpbf16ps", "tdpbf16ps") and n >= TILE_ROWS and k % STEP == 0


@script.kernel
def gemm_bfloat16(m: int, n: int, k: int, isa: InstructionSet) -> PrimFunc:
    """Return y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w bfloat16, 32 | k and n >= 32.

    The inputs are rounded half to even to bfloat16. Inactive rows are not multiplied, and the order of a row's sum does
    not depend on the other rows. Parallel over rows while they are searched and moved, then over panels of weight rows.
    """
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    scan = T.parallel if m * k >= tiles.PARALLEL_WEIGHTS else T.serial
    blocks, steps = -(-m // TILE_ROWS) * HALVES, k // STEP
    sums = (blocks // HALVES, PANEL_ROWS // TILE_ROWS, TILE_ROWS * TILE_ROWS)
    packed = (PANEL_ROWS // LANES, min(PART, steps), LANES * LANES)
    multiply = partial(_tile_panel if isa.bfloat16 == "tdpbf16ps" else _vector_panel, n, steps)

    @script.prim_func(private=True, s_tir=True)
    def linear_bfloat16_rows(
        x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), "bfloat16"), y: T.Buffer((m, n), "float32")
    ):
        with T.sblock("product"):
            script.access([x, w], [y])
            T.attr(0, "pragma_import_llvm", BRIDGE)
            rows = script.temporaries(xt=(blocks, k // PAIR, LANES, "float32"), at=(blocks * LANES, "int32"))
            active = tiles.active_rows(m)
            floats.find_rows(x, y, (m, n, k), active, scan)
            for i in range((active.count[0] + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS):
                rows.at[i] = active.rows[T.min(i, active.count[0] - 1)]
            for step in scan(steps):
                for block in range((active.count[0] + TILE_ROWS - 1) // TILE_ROWS * HALVES):
                    floats.transpose_rows(partial(_rounded, x), rows.xt, active, block, step)
            for panel in loop(-(-n // PANEL_ROWS)):
                o = script.temporaries(w=w, y=y, rows=rows, sums=(*sums, "float32"), packed=(*packed, "float32"))
                multiply(o, panel, active)

    return linear_bfloat16_rows


def _rounded(x: Any, row: Expr, step: Expr) -> Expr:
    """Return 32 inputs of a row as bfloat16, two in each lane."""
    return T.call_pure_extern(
        f"float32x{LANES}", _ROUND, x[row, ramp(step * STEP, LANES)], x[row, ramp(step * STEP + LANES, LANES)]
    )


@script.inlined
def _begin(acc, _v):
    for r in T.unroll(WEIGHT_ROWS):
        acc[vector(r, LANES)] = T.Broadcast(T.float32(0), LANES)


@script.inlined
def _add(o, place, c, r, acc, v):
    weights = T.meta_var(T.reinterpret("float32", o.w[place.j + r, ramp(c * PAIR, PAIR)]))
    acc[vector(r, LANES)] = dot(
        acc[vector(r, LANES)], o.rows.xt[place.block + v, c, ramp(0, LANES)], T.Broadcast(weights, LANES)
    )


@script.inlined
def _finish(o, acc, v):
    for r in T.unroll(WEIGHT_ROWS):
        o.sums[0, 0, vector(v * WEIGHT_ROWS + r, LANES)] = acc[vector(r, LANES)]


@script.inlined
def _multiply_vectors(steps, blocks, o, place):
    """Write the tile of eight weight rows by `blocks` blocks of x."""
    # One buffer for each block of x. All sums are in registers.
    sums = script.buffers(blocks, SUMS)
    script.each(_begin, sums)
    for step in range(steps):
        tiles.prefetch_panel(o.w, place, step * STEP)
        # c: two inputs. A broadcast of weights serves up to three blocks of 16 rows.
        for c in range(LANES):
            for r in T.unroll(WEIGHT_ROWS):
                script.each(_add, sums, o, place, step * LANES + c, r)
    script.each(_finish, sums, o)
    tiles.store_blocks(o.y, o.rows, o.sums, (0, 0), 0, blocks, place)


@script.inlined
def _vector_panel(n, steps, o, panel, active):
    """Multiply the weight rows of a panel with all blocks of x."""
    most = T.meta_var(tiles.most_blocks(int(o.rows.xt.shape[0]) * LANES))
    tiles.for_panel(panel, n, most, tiles.nothing, partial(_multiply_vectors, steps), (o,), active)


# AMX: a tile is rows of 64 bytes, and 16 by 16 sums are one. 0 to 3 are sums, 4 and 5 weights, 6 and 7 x.


HALVES = 2
"""Tiles of weights, and of x, whose products are four tiles of sums."""

TILE_ROWS = HALVES * LANES
"""Weight rows, and rows of x, of a tile of outputs."""

PART = 16
"""Steps of a part of the reduction."""

_WEIGHTS, _X = HALVES**2, HALVES**2 + HALVES


def _tile(name: str, *operands: Any) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))


def _configure() -> None:
    # The first of 64 bytes names the form; from 16 on are the bytes of a row, and from 48 on the rows, of each tile.
    form = bytearray(64)
    form[0] = 1
    for tile in range(8):
        form[16 + 2 * tile], form[48 + tile] = 64, LANES
    config = T.alloc_buffer((8,), "int64")
    for place, word in enumerate(memoryview(form).cast("q")):
        T.buffer_store(config, T.int64(word), [place])
    _tile("ldtilecfg", T.address_of(config[0]))


def _add_tiles(o: Any, t: Expr, block: Expr, step: Expr, place: Expr) -> None:
    for i in range(HALVES):
        weights, x = o.packed[t * HALVES + i, place, 0], o.rows.xt[block + i, step * LANES, 0]
        _tile("tileloadd64", T.int8(_WEIGHTS + i), T.address_of(weights), T.int64(64))
        _tile("tileloadd64", T.int8(_X + i), T.address_of(x), T.int64(64))
    for i in range(HALVES**2):
        _tile("tdpbf16ps", T.int8(i), T.int8(_WEIGHTS + i % HALVES), T.int8(_X + i // HALVES))


def _each_sum(name: str, o: Any, pair: Expr, t: Expr) -> None:
    for i in range(HALVES**2):
        place = T.address_of(o.sums[pair, t, i * LANES * LANES])
        _tile(name, T.int8(i), *([] if name == "tilezero" else [place, T.int64(64)]))


@script.inlined
def _multiply_tiles(steps, part, o, pair, t):
    """Add a part of the reduction to the sums of tile t of the panel and of two blocks of x."""
    if part == 0:
        _each_sum("tilezero", o, pair, t)
    else:
        _each_sum("tileloadd64", o, pair, t)
    for i in range(T.min(PART, steps - part * PART)):
        step = T.meta_var(part * PART + i)
        _add_tiles(o, t, pair * HALVES, step, i)
    _each_sum("tilestored64", o, pair, t)


def _first_row(n: int, panel: Expr, t: Expr) -> Expr:
    # The last tile begins early enough that all its weight rows exist.
    return T.min(panel * PANEL_ROWS + t * TILE_ROWS, n - TILE_ROWS)


@script.inlined
def _pack(n, steps, o, panel, part):
    """Copy a part of the reduction of the panel's weight rows, so that a tile of weights is 1,024 bytes together."""
    for r in range(PANEL_ROWS):
        row: T.let = _first_row(n, panel, r // TILE_ROWS) + r % TILE_ROWS
        for i in range(T.min(PART, steps - part * PART)):
            o.packed[r // LANES, i, ramp(r % LANES * LANES, LANES)] = T.reinterpret(
                f"float32x{LANES}", o.w[row, ramp((part * PART + i) * STEP, STEP)]
            )


@script.inlined
def _store_tiles(o, j, pair, t):
    # eight: weight rows, of which a tile of sums has two times eight.
    for b in range(HALVES):
        for eight in range(TILE_ROWS // WEIGHT_ROWS):
            first = T.meta_var(b * TILE_ROWS + eight * WEIGHT_ROWS)
            place = T.meta_var(Place(j + eight * WEIGHT_ROWS, 0, pair * HALVES + b))
            tiles.store_blocks(o.y, o.rows, o.sums, (pair, t), first, 1, place)


@script.inlined
def _tile_panel(n, steps, o, panel, active):
    """Multiply the weight rows of a panel with all blocks of x."""
    _configure()
    # A part of the reduction of 32 weight rows stays in the first-level cache while all rows of x pass.
    for part in range(-(-steps // PART)):
        _pack(n, steps, o, panel, part)
        for t in range(PANEL_ROWS // TILE_ROWS):
            for pair in range((active.count[0] + TILE_ROWS - 1) // TILE_ROWS):
                if panel * PANEL_ROWS + t * TILE_ROWS < n:
                    _multiply_tiles(steps, part, o, pair, t)
                    if part == (steps - 1) // PART:
                        _store_tiles(o, _first_row(n, panel, t), pair, t)
    _tile("tilerelease")
