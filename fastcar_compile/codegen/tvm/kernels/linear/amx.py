"""Products of many rows of x on AMX: int8, and x rounded to bfloat16 with bfloat16 weights, whose sums are float32.

A 32-bit lane is two inputs of a row of x, or four of int8. The active rows are moved once, so that a vector holds such
inputs of 16 rows. 16 such vectors are a tile, and so is a step of 16 weight rows. A tile is rows of 64 bytes, and 16 by
16 sums are one; tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 x.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear import floats, tiles
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, Expr, prefetch, ramp

LANES = 16

HALVES = 2
"""Tiles of weights, and at most of x, whose products are tiles of sums."""

TILE_ROWS = HALVES * LANES
"""Weight rows of a tile of outputs."""

PART = 16
"""Steps of a part of the reduction of many rows of x."""

PANEL_TILES = 4
"""Tiles of weight rows that meet a part of x while it is in the second-level cache."""

SIZE = LANES * LANES
"""Lanes of a tile."""

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


def _shape(kind: str, m: int, n: int, k: int) -> Any:
    """Return the sizes of the loops over m rows of x, n weight rows and k inputs."""
    size = LINE // 2 if kind == "bfloat16" else LINE
    steps, across = k // size, min(HALVES, -(-m // LANES))
    pairs = -(-m // (across * LANES))
    # x stays in the cache where all of it is one tile.
    part = steps if pairs == 1 else min(PART, steps)
    # size: inputs of a step, a cache line of a weight row. across, pairs: tiles of x of outputs, and such along x.
    # part, parts: of the reduction. panel: tiles of weight rows of an iteration. sums: tiles of sums.
    panel, parts = min(PANEL_TILES, -(-n // (4 * TILE_ROWS))), -(-steps // part)
    loops = {"steps": steps, "across": across, "pairs": pairs, "part": part, "parts": parts, "panel": panel}
    return SimpleNamespace(kind=kind, n=n, size=size, sums=HALVES * across, **loops)


def multiplies(kind: str, n: int, k: int, isa: InstructionSet) -> bool:
    """Return whether `linear_tiles` takes n weight rows of k inputs."""
    return isa.int8 == "amx" and n >= TILE_ROWS and k % (LINE // 2 if kind == "bfloat16" else LINE) == 0


@script.kernel
def linear_tiles(kind: Literal["bfloat16", "int8"], m: int, n: int, k: int) -> PrimFunc:
    """Return what `linear_few` returns, or for bfloat16 y[m, n] = sum_k x[m, k] * w[n, k], x and y float32.

    bfloat16: x is rounded half to even. n >= 32, and k is a multiple of 32, or for int8 of 64. Inactive rows are not
    multiplied, and the order of a row's sum does not depend on the other rows. Parallel over rows while they are
    searched and moved, then over panels of weight rows.
    """
    f = _shape(kind, m, n, k)
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    scan = T.parallel if m * k >= tiles.PARALLEL_WEIGHTS else T.serial
    blocks = f.pairs * f.across

    @script.inlined
    def multiply(o):
        rows = script.temporaries(xt=(f.parts, blocks, f.part * LANES, LANES, "float32"), at=(blocks * LANES, "int32"))
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, tiles.nothing, scan)
        pairs = T.meta_var((active.count[0] + f.across * LANES - 1) // (f.across * LANES))
        for i in range(pairs * (f.across * LANES)):
            rows.at[i] = active.rows[T.min(i, active.count[0] - 1)]
        for block in scan(pairs * f.across):
            for step in range(f.steps):
                floats.transpose(partial(_moved, f, o.q, rows, block, step), partial(_put, f, rows, block, step))
        for panel in loop(-(-n // (f.panel * TILE_ROWS))):
            p = script.temporaries(
                sums=(f.pairs, f.panel, f.sums * SIZE, "float32"),
                packed=(f.panel * HALVES, f.part, SIZE, "float32"),
                rows=rows,
            )
            _multiply_panel(f, o, p, panel, pairs)

    if kind == "bfloat16":

        @script.inlined
        def body(x, w, y):
            T.attr(0, "pragma_import_llvm", _BRIDGE)
            o = script.temporaries(q=x, w=w, y=y)
            multiply(o)

        return tiles.float_linear("linear_bfloat16_rows", "bfloat16", (m, n, k), body)

    @script.inlined
    def integer_body(q, s, w, ws, y):
        o = script.temporaries(q=q, s=s, w=w, ws=ws, y=y)
        multiply(o)

    return tiles.integer_linear(kind, "_rows", (m, n, k), integer_body)


def _moved(f: Any, x: Any, rows: Any, block: Expr, step: Expr, i: Expr) -> Expr:
    """Return the inputs of a step of row i of a block, several in each lane."""
    row = rows.at[block * LANES + i]
    if f.kind != "bfloat16":
        return T.reinterpret(f"float32x{LANES}", x[row, ramp(step * f.size, f.size)])
    halves = [x[row, ramp(step * f.size + half * LANES, LANES)] for half in range(2)]
    return T.call_pure_extern(f"float32x{LANES}", _ROUND, *halves)


def _put(f: Any, rows: Any, block: Expr, step: Expr, i: Expr, value: Expr) -> None:
    T.buffer_store(rows.xt, value, [step // f.part, block, step % f.part * LANES + i, ramp(0, LANES)])


def _tile(name: str, *operands: Any) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))


def _configure() -> None:
    # The first of 64 bytes names the form; from 16 on are the bytes of a row, and from 48 on the rows, of each tile.
    form = bytearray(64)
    form[0] = 1
    for tile in range(8):
        form[16 + 2 * tile], form[48 + tile] = LINE, LANES
    config = T.alloc_buffer((8,), "int64")
    for place, word in enumerate(memoryview(form).cast("q")):
        T.buffer_store(config, T.int64(word), [place])
    _tile("ldtilecfg", T.address_of(config[0]))


def _address(buffer: Any, *index: Expr) -> Expr:
    # Unlike T.address_of, it tells TVM that more than this element is used, so the buffer keeps its size.
    return buffer.access_ptr("rw", offset=buffer.offset_of(index)[0])


def _load_weights(f: Any, o: Any, row: Expr, step: Expr, packed: Expr, first: bool, i: int) -> None:
    if not first:
        _tile("tileloadd64", T.int8(_WEIGHTS + i), packed, T.int64(LINE))
        return
    weights = T.address_of(o.w[row + i * LANES, step * f.size])
    _tile("tileloadd64", T.int8(_WEIGHTS + i), weights, T.int64(LINE // f.size * int(o.w.shape[1])))
    # Rows that lie a power of two apart share a few places of a cache, so what is read again is copied together.
    if f.pairs > 1:
        _tile("tilestored64", T.int8(_WEIGHTS + i), packed, T.int64(LINE))


def _add_tiles(f: Any, o: Any, p: Any, part: Expr, t: Expr, pair: Expr, step: Expr, row: Expr, first: bool) -> None:
    for i in range(HALVES):
        packed = _address(p.packed, t * HALVES + i, step, 0)
        _load_weights(f, o, row, part * f.part + step, packed, first, i)
    for i in range(f.across):
        x = _address(p.rows.xt, part, pair * f.across + i, step * LANES, 0)
        _tile("tileloadd64", T.int8(_X + i), x, T.int64(LINE))
    for i in range(f.sums):
        name = "tdpbf16ps" if f.kind == "bfloat16" else "tdpbssd"
        _tile(name, T.int8(i), T.int8(_WEIGHTS + i % HALVES), T.int8(_X + i // HALVES))


def _each_sum(f: Any, name: str, p: Any, pair: Expr, t: Expr) -> None:
    for i in range(f.sums):
        place = _address(p.sums, pair, t, i * SIZE)
        _tile(name, T.int8(i), *([] if name == "tilezero" else [place, T.int64(LINE)]))


@script.inlined
def _multiply_tiles(f, o, p, part, pair, t, row, ahead):
    """Add a part of the reduction to the sums of tile t of the panel and of a pair of blocks of x."""
    if part == 0:
        _each_sum(f, "tilezero", p, pair, t)
    else:
        _each_sum(f, "tileloadd64", p, pair, t)
    # Each pair of blocks fetches a share of the weights that tile t multiplies next, at row and part `ahead`.
    share = T.meta_var(-(-TILE_ROWS // f.pairs))
    for i in range(T.min(f.part, f.steps - part * f.part)):
        if pair == 0:
            _add_tiles(f, o, p, part, t, pair, i, row, True)
        else:
            _add_tiles(f, o, p, part, t, pair, i, row, False)
        for r in T.unroll(share):
            T.evaluate(prefetch(o.w[ahead[0] + pair * share + r, (ahead[1] * f.part + i) * f.size]))
    _each_sum(f, "tilestored64", p, pair, t)


def _sum(p: Any, pair: Expr, t: Expr, tile: int, i: Expr) -> Expr:
    return p.sums[pair, t, ramp(tile * SIZE + i * LANES, LANES)]


def _result(f: Any, o: Any, p: Any, block: Expr, j: Expr, i: Expr, value: Expr) -> None:
    row = p.rows.at[block * LANES + i]
    if f.kind == "int8":
        # The scales are multiplied first: the order of the definition decides the rounding.
        scales = T.Broadcast(o.s[row], LANES) * o.ws[ramp(j, LANES)]
        value = T.Cast(f"float32x{LANES}", T.reinterpret(f"int32x{LANES}", value)) * scales
    T.buffer_store(o.y, value, [row, ramp(j, LANES)])


@script.inlined
def _store_tiles(f, o, p, j, pair, t):
    for b in range(f.across):
        for half in range(HALVES):
            floats.transpose(
                partial(_sum, p, pair, t, b * HALVES + half),
                partial(_result, f, o, p, pair * f.across + b, j + half * LANES),
            )


@script.inlined
def _multiply_panel(f, o, p, panel, pairs):
    """Multiply the weight rows of a panel with all blocks of x."""
    _configure()
    # A part of the reduction of 32 weight rows stays in the first-level cache while all rows of x pass, and that of x
    # in the second-level cache while the panel's tiles pass.
    for part in range(f.parts):
        for t in range(f.panel):
            first: T.let = (panel * f.panel + t) * TILE_ROWS
            if first < f.n:
                # The last tile begins early enough that all its weight rows exist.
                row: T.let = T.min(first, f.n - TILE_ROWS)
                # With several parts the next tile of this part comes before the next part of this tile.
                ahead = T.meta_var((first + (part + 1) // f.parts * f.panel * TILE_ROWS, (part + 1) % f.parts))
                for pair in range(pairs):
                    _multiply_tiles(f, o, p, part, pair, t, row, ahead)
                    if part == f.parts - 1:
                        _store_tiles(f, o, p, row, pair, t)
    _tile("tilerelease")
