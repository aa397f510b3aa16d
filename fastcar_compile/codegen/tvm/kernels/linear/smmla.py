"""Products of several rows with Arm's SMMLA and BFMMLA: int8 and int4 bit for bit as `linear_w8a8` and `linear_w4a8`.

SMMLA adds the products of two rows of eight bytes with two other rows of eight bytes to a block of 2 x 2 int32 sums. So
the active rows of x are moved once, in pairs: eight inputs of both in turn. Weight rows are paired in registers. No sum
goes across lanes, and the int4 groups are scaled as whole vectors. BFMMLA does the same with four bfloat16.
"""

from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.linear import floats, tiles
from fastcar_compile.codegen.tvm.kernels.linear.w4a8 import HALF, signed_nibbles
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, fence, intrinsic, load_from, ramp, vector
from fastcar_compile.ir.ops.linear import GROUP

STEP = 16
"""Bytes of a vector, and inputs of a step."""

COLUMNS = 4
"""Most pairs of rows of x of a tile."""

INT8_ROWS, INT4_ROWS = 8, 4
"""Weight rows of a tile. 4 x 4 blocks of int32 sums leave registers for weights and x. For int4 a block has float32
totals too, so there are half as many."""


def _smmla(acc: Expr, x: Expr, w: Expr) -> Expr:
    # The lanes are x0 w0, x0 w1, x1 w0, x1 w1.
    return intrinsic("int32x4", "llvm.aarch64.neon.smmla.v4i32.v16i8", acc, x, w)


_DOT, _ROUND = "fastcar_bfmmla", "fastcar_round_bfloat16"
_BRIDGE = f"""
declare <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float>, <8 x bfloat>, <8 x bfloat>)
define <4 x float> @{_DOT}(<4 x float> %sum, <16 x i8> %x, <16 x i8> %w) {{
  %a = bitcast <16 x i8> %x to <8 x bfloat>
  %b = bitcast <16 x i8> %w to <8 x bfloat>
  %y = call <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float> %sum, <8 x bfloat> %a, <8 x bfloat> %b)
  ret <4 x float> %y
}}
define <8 x i8> @{_ROUND}(<4 x float> %x) {{
  %a = fptrunc <4 x float> %x to <4 x bfloat>
  %y = bitcast <4 x bfloat> %a to <8 x i8>
  ret <8 x i8> %y
}}
"""
"""TVM has no values of LLVM's type bfloat, which the intrinsic takes."""


def _zip(first: Expr, second: Expr, half: int) -> Expr:
    """Return eight bytes of each of two vectors."""
    lanes = range(8 * half, 8 * half + 8)
    return T.Shuffle([first, second], [*lanes, *(STEP + lane for lane in lanes)])


def _pairs(m: int, steps: int) -> Any:
    """Allocate pairs of active rows: how many, their numbers in x and y, scales as the lanes of a block, inputs."""
    count, pairs = (1, "int32"), -(-m // 2)
    return script.temporaries(
        count=count, rows=(2 * pairs, "int32"), scales=(4 * pairs, "float32"), xt=(pairs, 2 * steps, STEP, "int8")
    )


@script.inlined
def _move(shape, steps, o):
    """Find the active rows of o.q and move them to o.pairs, padded with zeros to whole steps."""
    active = tiles.active_rows(shape[0])
    tiles.find_active(o, shape, active, tiles.nothing)
    o.pairs.count[0] = (active.count[0] + 1) // 2
    for p in range(o.pairs.count[0]):
        for v in T.unroll(2):
            # The last one of an odd number of rows is its own partner.
            row: T.let = active.rows[T.min(2 * p + v, active.count[0] - 1)]
            o.pairs.rows[2 * p + v] = row
            o.pairs.scales[ramp(4 * p + 2 * v, 2)] = T.Broadcast(o.s[row], 2)
            # c: eight inputs of the row are one half of a vector.
            for c in range(shape[2] // 8):
                o.pairs.xt[p, c, ramp(8 * v, 8)] = o.q[row, ramp(8 * c, 8)]
            for c in range(2 * steps - shape[2] // 8):
                o.pairs.xt[p, shape[2] // 8 + c, ramp(8 * v, 8)] = T.Broadcast(T.int8(0), 8)
            for t in range(shape[2] % 8):
                o.pairs.xt[p, shape[2] // 8, 8 * v + t] = o.q[row, shape[2] // 8 * 8 + t]


def _pair(tile: Any, r: int) -> list[Expr]:
    # The last weight row of an odd number is its own partner.
    return [tile.j + min(2 * r + v, tile.rows - 1) for v in range(2)]


def _of_pair(values: list[Expr]) -> Expr:
    """Return the values of two weight rows in the lanes of a block."""
    return vectors.vector_of([*values, *values])


@script.inlined
def _prefetch(o, tile, ahead, byte):
    # Only the first tile of x prefetches: the others find the weights in the cache.
    if tile.i == 0:
        for v in T.unroll(tile.rows):
            T.evaluate(vectors.prefetch(o.w[tile.j + ahead + v, byte]))


@script.inlined
def _clear(columns, acc, _r):
    for i in T.unroll(columns):
        acc[vector(i, 4)] = T.Broadcast(0, 4)


@script.inlined
def _store(o, tile, sums, r, i):
    """Write a block of sums float32 [4]; what an odd number of rows repeats is not stored, or is stored again."""
    for v in T.unroll(2):
        row: T.let = o.pairs.rows[2 * (tile.i + i) + v]
        width = T.meta_var(min(2, tile.rows - 2 * r))
        o.y[row, ramp(tile.j + 2 * r, width)] = sums[ramp(2 * v, width)]


@script.inlined
def _finish_int8(o, tile, acc, r):
    sums = T.alloc_buffer((4,), "float32")
    for i in T.unroll(tile.columns):
        # The scales are multiplied first: the order of the definition decides the rounding.
        sums[ramp(0, 4)] = T.Cast("float32x4", acc[vector(i, 4)]) * (
            o.pairs.scales[vector(tile.i + i, 4)] * _of_pair([o.ws[j] for j in _pair(tile, r)])
        )
        _store(o, tile, sums, r, i)


@script.inlined
def _add_int8(o, tile, c, acc, r):
    two = T.alloc_buffer((2 * STEP,), "int8")
    first, second = T.meta_var(tuple(_pair(tile, r)))
    two[vector(0, STEP)] = _zip(o.w[first, vector(c, STEP)], o.w[second, vector(c, STEP)], 0)
    two[vector(1, STEP)] = _zip(o.w[first, vector(c, STEP)], o.w[second, vector(c, STEP)], 1)
    for i in T.unroll(tile.columns):
        for h in T.unroll(2):
            acc[vector(i, 4)] = _smmla(
                acc[vector(i, 4)], o.pairs.xt[tile.i + i, 2 * c + h, ramp(0, STEP)], two[vector(h, STEP)]
            )


@script.inlined
def _multiply_int8(steps, ahead, o, tile):
    """Write the outputs of a tile of weight rows by pairs of rows of x."""
    with T.sblock("tile"):
        script.access([o.w, o.ws, o.pairs.rows, o.pairs.scales, o.pairs.xt], [o.y])
        # A buffer for each pair of weight rows: all sums are in registers.
        accs = script.buffers(-(-tile.rows // 2), 4 * tile.columns, "int32")
        script.each(_clear, accs, tile.columns)
        # c: 16 inputs, which are a vector of each weight row.
        for c in range(steps):
            _prefetch(o, tile, ahead, c * STEP)
            script.each(_add_int8, accs, o, tile, c)
        script.each(_finish_int8, accs, o, tile)


@script.kernel
def smmla_w8a8(m: int, n: int, k: int) -> PrimFunc:
    """Return what `linear_w8a8` returns, for two or more rows of x and 16 | k. Parallel over tiles of weight rows."""
    steps, rows = k // STEP, min(INT8_ROWS, n)
    multiply = partial(_multiply_int8, steps, vectors.prefetch_distance(rows, k)[0])
    body = _body((m, n, k), steps, rows, multiply)
    return tiles.integer_linear("linear_i8_smmla", (m, n, k), ((n, k), "int8"), ((n,), "float32"), body)


def _body(shape: tuple[int, int, int], steps: int, rows: int, multiply: Any) -> Any:
    """Return the macro of a kernel: it moves the active rows of x, and then multiplies tiles of `rows` weight rows."""
    m, n, k = shape
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    tiling = tiles.Tiling(n, rows, min(COLUMNS, -(-m // 2)), loop, together=True)

    @script.inlined
    def body(q, s, w, ws, y):
        pairs = _pairs(m, steps)
        o = script.temporaries(q=q, s=s, w=w, ws=ws, y=y, pairs=pairs)
        _move(shape, steps, o)
        tiles.for_tiles(tiling, multiply, o, o.pairs)

    return body


@script.inlined
def _add_int4(o, tile, g, acc, r):
    two = T.alloc_buffer((2 * STEP,), "uint8")
    four = T.alloc_buffer((4 * STEP,), "int8")
    first, second = T.meta_var(tuple(_pair(tile, r)))
    # c: 16 bytes of each weight row, which are 16 of the first 64 inputs and 16 of the last 64.
    for c in range(HALF // STEP):
        at = T.meta_var(ramp(g * HALF + c * STEP, STEP))
        # Bytes are paired before they are unpacked.
        two[vector(0, STEP)] = _zip(o.w[first, at], o.w[second, at], 0)
        two[vector(1, STEP)] = _zip(o.w[first, at], o.w[second, at], 1)
        for h in T.unroll(2):
            four[vector(h, STEP)] = signed_nibbles(load_from(two, [], h * STEP), 0, STEP)[0]
            four[vector(2 + h, STEP)] = signed_nibbles(load_from(two, [], h * STEP), 0, STEP)[1]
        for i in T.unroll(tile.columns):
            for v in T.unroll(4):
                eights = T.meta_var(g * (GROUP // 8) + v // 2 * (HALF // 8) + 2 * c + v % 2)
                acc[vector(i, 4)] = _smmla(
                    acc[vector(i, 4)], o.pairs.xt[tile.i + i, eights, ramp(0, STEP)], four[vector(v, STEP)]
                )


@script.inlined
def _add_groups(o, tile, g, accs, total, r):
    # A group's sum is exact. Groups are added in ascending order, and the fence rounds each product first.
    for i in T.unroll(tile.columns):
        total[vector(i, 4)] = total[vector(i, 4)] + fence(
            "float32x4",
            T.Cast("float32x4", accs[r][vector(i, 4)])
            * T.Cast("float32x4", _of_pair([o.ws[j, g] for j in _pair(tile, r)])),
        )


@script.inlined
def _clear_totals(columns, total, _r):
    for i in T.unroll(columns):
        total[vector(i, 4)] = T.Broadcast(T.float32(0), 4)


@script.inlined
def _finish_int4(o, tile, total, r):
    sums = T.alloc_buffer((4,), "float32")
    for i in T.unroll(tile.columns):
        sums[ramp(0, 4)] = total[vector(i, 4)] * o.pairs.scales[vector(tile.i + i, 4)]
        _store(o, tile, sums, r, i)


@script.inlined
def _multiply_int4(groups, ahead, o, tile):
    """Write the outputs of a tile of weight rows by pairs of rows of x."""
    with T.sblock("tile"):
        script.access([o.w, o.ws, o.pairs.rows, o.pairs.scales, o.pairs.xt], [o.y])
        accs = script.buffers(-(-tile.rows // 2), 4 * tile.columns, "int32")
        totals = script.buffers(-(-tile.rows // 2), 4 * tile.columns)
        script.each(_clear_totals, totals, tile.columns)
        # g: groups in ascending order. A group of a weight row is one cache line.
        for g in range(groups):
            _prefetch(o, tile, ahead, g * HALF)
            script.each(_clear, accs, tile.columns)
            script.each(_add_int4, accs, o, tile, g)
            script.each(_add_groups, totals, o, tile, g, accs)
        script.each(_finish_int4, totals, o, tile)


@script.kernel
def smmla_w4a8(m: int, n: int, k: int) -> PrimFunc:
    """Return what `linear_w4a8` returns, for two or more rows of x. Parallel over tiles of weight rows."""
    groups, steps, rows = -(-k // GROUP), -(-k // GROUP) * GROUP // STEP, min(INT4_ROWS, n)
    multiply = partial(_multiply_int4, groups, vectors.prefetch_distance(rows, groups * HALF)[0])
    body = _body((m, n, k), steps, rows, multiply)
    weights, scales = ((n, groups * HALF), "uint8"), ((n, groups), "float16")
    return tiles.integer_linear("linear_i4_smmla", (m, n, k), weights, scales, body)


# bfloat16: eight bytes are four inputs.


@script.inlined
def _move_rounded(k, x, active, pairs):
    """Move the active rows of x float32 to pairs of rows of bfloat16."""
    pairs.count[0] = (active.count[0] + 1) // 2
    for p in range(pairs.count[0]):
        for v in T.unroll(2):
            row: T.let = active.rows[T.min(2 * p + v, active.count[0] - 1)]
            pairs.rows[2 * p + v] = row
            for c in range(k // 4):
                pairs.xt[p, c, ramp(8 * v, 8)] = T.call_pure_extern("int8x8", _ROUND, x[row, ramp(4 * c, 4)])


def _eight(o: Any, row: Expr, c: Expr) -> Expr:
    return T.reinterpret(f"int8x{STEP}", o.w[row, vector(c, STEP // 2)])


@script.inlined
def _add_bfloat16(o, tile, c, acc, r):
    two = T.alloc_buffer((2 * STEP,), "int8")
    first, second = T.meta_var(tuple(_pair(tile, r)))
    two[vector(0, STEP)] = _zip(_eight(o, first, c), _eight(o, second, c), 0)
    two[vector(1, STEP)] = _zip(_eight(o, first, c), _eight(o, second, c), 1)
    for i in T.unroll(tile.columns):
        for h in T.unroll(2):
            acc[vector(i, 4)] = T.call_pure_extern(
                "float32x4",
                _DOT,
                acc[vector(i, 4)],
                o.pairs.xt[tile.i + i, 2 * c + h, ramp(0, STEP)],
                two[vector(h, STEP)],
            )


@script.inlined
def _finish_bfloat16(o, tile, acc, r):
    sums = T.alloc_buffer((4,), "float32")
    for i in T.unroll(tile.columns):
        sums[ramp(0, 4)] = acc[vector(i, 4)]
        _store(o, tile, sums, r, i)


@script.inlined
def _multiply_bfloat16(steps, ahead, o, tile):
    """Write the outputs of a tile of weight rows by pairs of rows of x."""
    with T.sblock("tile"):
        script.access([o.w, o.pairs.rows, o.pairs.xt], [o.y])
        accs = script.buffers(-(-tile.rows // 2), 4 * tile.columns)
        script.each(_clear_totals, accs, tile.columns)
        # c: eight inputs, which are a vector of each weight row.
        for c in range(steps):
            _prefetch(o, tile, ahead, c * STEP // 2)
            script.each(_add_bfloat16, accs, o, tile, c)
        script.each(_finish_bfloat16, accs, o, tile)


@script.kernel
def bfmmla_bfloat16(m: int, n: int, k: int) -> PrimFunc:
    """Return what `gemm_bfloat16` returns but for the order of sums, for 8 | k. Parallel over tiles of weight rows."""
    steps, rows = k // (STEP // 2), min(INT8_ROWS, n)
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    tiling = tiles.Tiling(n, rows, min(COLUMNS, -(-m // 2)), loop, together=True)
    multiply = partial(_multiply_bfloat16, steps, vectors.prefetch_distance(rows, 2 * k)[0])

    @script.prim_func(private=True, s_tir=True)
    def linear_bfloat16_bfmmla(
        x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), "bfloat16"), y: T.Buffer((m, n), "float32")
    ):
        with T.sblock("product"):
            script.access([x, w], [y])
            T.attr(0, "pragma_import_llvm", _BRIDGE)
            active = tiles.active_rows(m)
            floats.find_rows(x, y, (m, n, k), active, T.serial)
            pairs = _pairs(m, steps)
            o = script.temporaries(w=w, y=y, pairs=pairs)
            _move_rounded(k, x, active, o.pairs)
            tiles.for_tiles(tiling, multiply, o, o.pairs)

    return linear_bfloat16_bfmmla
