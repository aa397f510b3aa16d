"""Products of many rows of x, rounded to bfloat16, with bfloat16 weights on AMX; sums are float32.

A 32-bit lane is two inputs of a row of x. The active rows are moved once, so that a vector holds two inputs of 16 rows.
16 such vectors are a tile, and so is a step of 16 weight rows. A tile is rows of 64 bytes, and 16 by 16 sums are one;
tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 x.
"""

from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear import floats, tiles
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, prefetch, ramp

LANES = 16
STEP = 2 * LANES
"""Inputs of a step: a cache line of a weight row."""

HALVES = 2
"""Tiles of weights, and of x, whose products are four tiles of sums."""

TILE_ROWS = HALVES * LANES
"""Weight rows, and rows of x, of a tile of outputs."""

PART = 16
"""Steps of a part of the reduction."""

PANEL_TILES = 4
"""Tiles of weight rows that meet a part of x while it is in the second-level cache."""

_WEIGHTS, _X = HALVES**2, HALVES**2 + HALVES

_ROUND = "fastcar_round_bfloat16"
_BRIDGE = f"""
define <16 x float> @{_ROUND}(<16 x float> %low, <16 x float> %high) {{
  %a = fptrunc <16 x float> %low to <16 x bfloat>
  %b = fptrunc <16 x float> %high to <16 x bfloat>
  %c = shufflevector <16 x bfloat> %a, <16 x bfloat> %b, <32 x i32> <{", ".join(f"i32 {i}" for i in range(32))}>
  %y = bitcast <32 x bfloat> %c to <16 x float>
  ret <16 x float> %y
}}
"""
"""TVM has no values of LLVM's type bfloat."""


def multiplies(n: int, k: int, isa: InstructionSet) -> bool:
    """Return whether `gemm_bfloat16` takes n weight rows of k inputs."""
    return isa.bfloat16 == "tdpbf16ps" and n >= TILE_ROWS and k % STEP == 0


@script.kernel
def gemm_bfloat16(m: int, n: int, k: int) -> PrimFunc:
    """Return y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w bfloat16, 32 | k and n >= 32.

    The inputs are rounded half to even to bfloat16. Inactive rows are not multiplied, and the order of a row's sum does
    not depend on the other rows. Parallel over rows while they are searched and moved, then over panels of weight rows.
    """
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    scan = T.parallel if m * k >= tiles.PARALLEL_WEIGHTS else T.serial
    steps = k // STEP
    blocks, part = -(-m // TILE_ROWS) * HALVES, min(PART, steps)
    panel_tiles = min(PANEL_TILES, -(-n // (4 * TILE_ROWS)))
    sums = (blocks // HALVES, panel_tiles, TILE_ROWS * TILE_ROWS)
    packed = (panel_tiles * HALVES, part, LANES * LANES)

    @script.inlined
    def body(x, w, y):
        T.attr(0, "pragma_import_llvm", _BRIDGE)
        rows = script.temporaries(
            xt=(-(-steps // part), blocks, part * LANES, LANES, "float32"), at=(blocks * LANES, "int32")
        )
        active = tiles.active_rows(m)
        o = script.temporaries(q=x, y=y)
        tiles.find_active(o, (m, n, k), active, tiles.nothing, scan)
        for i in range((active.count[0] + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS):
            rows.at[i] = active.rows[T.min(i, active.count[0] - 1)]
        for block in scan((active.count[0] + TILE_ROWS - 1) // TILE_ROWS * HALVES):
            for step in range(steps):
                floats.transpose(partial(_rounded, x, rows, block, step), partial(_put, part, rows, block, step))
        for panel in loop(-(-n // (panel_tiles * TILE_ROWS))):
            o = script.temporaries(w=w, y=y, rows=rows, sums=(*sums, "float32"), packed=(*packed, "float32"))
            _multiply_panel(n, steps, o, panel, active)

    return tiles.float_linear("linear_bfloat16_rows", "bfloat16", (m, n, k), body)


def _rounded(x: Any, rows: Any, block: Expr, step: Expr, i: Expr) -> Expr:
    """Return 32 inputs of row i of a block as bfloat16, two in each lane."""
    row = rows.at[block * LANES + i]
    return T.call_pure_extern(
        f"float32x{LANES}", _ROUND, x[row, ramp(step * STEP, LANES)], x[row, ramp(step * STEP + LANES, LANES)]
    )


def _put(part: int, rows: Any, block: Expr, step: Expr, i: Expr, value: Expr) -> None:
    T.buffer_store(rows.xt, value, [step // part, block, step % part * LANES + i, ramp(0, LANES)])


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


def _address(buffer: Any, *index: Expr) -> Expr:
    # Unlike T.address_of, it tells TVM that more than this element is used, so the buffer keeps its size.
    return buffer.access_ptr("rw", offset=buffer.offset_of(index)[0])


def _load_weights(o: Any, row: Expr, column: Expr, packed: Expr, first: bool, i: int) -> None:
    if not first:
        _tile("tileloadd64", T.int8(_WEIGHTS + i), packed, T.int64(64))
        return
    # Rows that lie a power of two apart share a few places of a cache, so the tile is copied to 1,024 bytes together.
    weights = T.address_of(o.w[row + i * LANES, column])
    _tile("tileloadd64", T.int8(_WEIGHTS + i), weights, T.int64(2 * int(o.w.shape[1])))
    _tile("tilestored64", T.int8(_WEIGHTS + i), packed, T.int64(64))


def _add_tiles(o: Any, part: Expr, t: Expr, pair: Expr, step: Expr, row: Expr, first: bool) -> None:
    for i in range(HALVES):
        packed = _address(o.packed, t * HALVES + i, step, 0)
        _load_weights(o, row, (part * PART + step) * STEP, packed, first, i)
        x = _address(o.rows.xt, part, pair * HALVES + i, step * LANES, 0)
        _tile("tileloadd64", T.int8(_X + i), x, T.int64(64))
    for i in range(HALVES**2):
        _tile("tdpbf16ps", T.int8(i), T.int8(_WEIGHTS + i % HALVES), T.int8(_X + i // HALVES))


def _each_sum(name: str, o: Any, pair: Expr, t: Expr) -> None:
    for i in range(HALVES**2):
        place = _address(o.sums, pair, t, i * LANES * LANES)
        _tile(name, T.int8(i), *([] if name == "tilezero" else [place, T.int64(64)]))


@script.inlined
def _multiply_tiles(steps, part, o, pair, t, row, ahead):
    """Add a part of the reduction to the sums of tile t of the panel and of two blocks of x."""
    if part == 0:
        _each_sum("tilezero", o, pair, t)
    else:
        _each_sum("tileloadd64", o, pair, t)
    # Each pair of blocks fetches a share of the weights that tile t multiplies next, at row and part `ahead`.
    share = T.meta_var(-(-TILE_ROWS // int(o.sums.shape[0])))
    for i in range(T.min(PART, steps - part * PART)):
        if pair == 0:
            _add_tiles(o, part, t, pair, i, row, True)
        else:
            _add_tiles(o, part, t, pair, i, row, False)
        for r in T.unroll(share):
            T.evaluate(prefetch(o.w[ahead[0] + pair * share + r, (ahead[1] * PART + i) * STEP]))
    _each_sum("tilestored64", o, pair, t)


def _sum(o: Any, pair: Expr, t: Expr, tile: int, i: Expr) -> Expr:
    return o.sums[pair, t, ramp(tile * LANES * LANES + i * LANES, LANES)]


def _result(o: Any, block: Expr, j: Expr, i: Expr, value: Expr) -> None:
    T.buffer_store(o.y, value, [o.rows.at[block * LANES + i], ramp(j, LANES)])


@script.inlined
def _store_tiles(o, j, pair, t):
    for b in range(HALVES):
        for half in range(HALVES):
            floats.transpose(
                partial(_sum, o, pair, t, b * HALVES + half), partial(_result, o, pair * HALVES + b, j + half * LANES)
            )


@script.inlined
def _multiply_panel(n, steps, o, panel, active):
    """Multiply the weight rows of a panel with all blocks of x."""
    _configure()
    panel_tiles = T.meta_var(int(o.sums.shape[1]))
    parts = T.meta_var(-(-steps // PART))
    # A part of the reduction of 32 weight rows stays in the first-level cache while all rows of x pass, and that of x
    # in the second-level cache while the panel's tiles pass.
    for part in range(parts):
        for t in range(panel_tiles):
            first: T.let = (panel * panel_tiles + t) * TILE_ROWS
            if first < n:
                # The last tile begins early enough that all its weight rows exist.
                row: T.let = T.min(first, n - TILE_ROWS)
                ahead = T.meta_var((first + (part + 1) // parts * panel_tiles * TILE_ROWS, (part + 1) % parts))
                for pair in range((active.count[0] + TILE_ROWS - 1) // TILE_ROWS):
                    _multiply_tiles(steps, part, o, pair, t, row, ahead)
                    if part == parts - 1:
                        _store_tiles(o, row, pair, t)
    _tile("tilerelease")
