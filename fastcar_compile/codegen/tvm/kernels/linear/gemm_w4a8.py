"""int4 GEMM of a prefill chunk or a large batch with AVX-512 VNNI, bit for bit as `linear_w4a8`."""

from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.linear import tiles
from fastcar_compile.codegen.tvm.kernels.linear.tiles import FOUR, LANES, PANEL_ROWS, SUMS, WEIGHT_ROWS, WIDTH
from fastcar_compile.codegen.tvm.kernels.linear.w4a8 import HALF, nibbles
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, fence, load_from, ramp, vector, vpdpbusd
from fastcar_compile.ir.ops.linear import GROUP

# int4 products of up to eight rows of x with AVX-512 VNNI, bit for bit as `linear_w4a8`.
#
# A vector holds the sums of four rows of x with four weight rows: four inputs of each of the weight rows are one
# broadcast of 16 bytes, which serves up to two vectors of rows, and four inputs of every row of x stand four times. So
# no sum across lanes is needed.


ROWS = 8
"""Most rows of x."""

QUADS = 12
"""Quads of weight rows of a tile. With two vectors of rows of x they are 24 sums in registers."""

TILE = FOUR * QUADS
STEPS = GROUP // FOUR
QUAD_BYTES = FOUR * GROUP


def few_buffers(vectors_of_x: int, groups: int) -> Any:
    """Allocate the moved rows of x, four a vector."""
    return script.temporaries(
        # The rows in fours, each four times; what the sums of a group begin with.
        xt=(vectors_of_x, groups * STEPS, WIDTH, "int8"),
        extra=(vectors_of_x, groups, LANES, "int32"),
        # Scales of the rows, each four times; numbers of the rows, beyond the last, of the last.
        scales=(vectors_of_x * LANES, "float32"),
        at=(vectors_of_x * FOUR, "int32"),
    )


@script.inlined
def _multiply_few(count, n, k, loop, o, p, active):
    """Write the products of `count` vectors of active rows; p as of `few_buffers`."""
    _move_few_rows(count, k, -(-k // GROUP), o.q, o.s, active, p)
    # j: tiles of 48 weight rows. The last one begins at n - 48, and its overlap is computed twice, alike.
    for j in loop(-(-n // TILE)):
        _multiply_tile(count, -(-k // GROUP), o, p, T.min(j * TILE, n - TILE))


def _four_times(four: Expr) -> Expr:
    return T.reinterpret("int8x16", T.Broadcast(T.reinterpret("int32", four), FOUR))


@script.inlined
def _move_few_rows(count, k, groups, q, s, active, p):
    """Move the active rows of q int8 [m, k], at most 4 * count, and add up groups."""
    # i: places, of which those past the last active row repeat it.
    for i in range(count * FOUR):
        p.at[i] = active.rows[T.min(i, active.count[0] - 1)]
        p.scales[vector(i, FOUR)] = T.Broadcast(s[p.at[i]], FOUR)
    # piece: 64 inputs of every row. c: four of them, in the order of `_unpack_quads`.
    for piece in range(groups * STEPS // LANES):
        for i in range(count * FOUR):
            row: T.let = p.at[i]
            for c in T.unroll(LANES):
                to = T.meta_var(piece * LANES + c % FOUR * FOUR + c // FOUR)
                # Zeros up to a whole group add nothing, whatever the weights are. 4 divides k, so no four is cut.
                if (piece * LANES + c) * FOUR < k:
                    p.xt[i // FOUR, to, vector(i % FOUR, LANES)] = _four_times(
                        q[row, ramp((piece * LANES + c) * FOUR, FOUR)]
                    )
                else:
                    p.xt[i // FOUR, to, vector(i % FOUR, LANES)] = T.Broadcast(T.int8(0), LANES)
    # g: groups. Weights are 8 too large, so the sums begin with -8 times the sum of the inputs.
    for h in range(count):
        for g in range(groups):
            _zero_point(p.xt, p.extra, h, g)


@script.inlined
def _zero_point(xt, extra, block, g):
    """Write -8 times the sums of a group of a block of rows: what the sums with weights plus 8 begin with."""
    sums = T.alloc_buffer((LANES,), "int32")
    sums[vector(0, LANES)] = T.Broadcast(0, LANES)
    # c: a vpdpbusd with the constant 8 adds 8 times four inputs of every row.
    for c in range(STEPS):
        sums[vector(0, LANES)] = vpdpbusd(
            sums[vector(0, LANES)], T.Broadcast(T.int8(8), WIDTH), xt[block, g * STEPS + c, ramp(0, WIDTH)], WIDTH
        )
    extra[block, g, ramp(0, LANES)] = T.Broadcast(0, LANES) - sums[vector(0, LANES)]


@script.inlined
def _transpose_fours(one, two, lanes):
    """Transpose four by four lanes of four vectors, in every block of four lanes."""
    for p in T.unroll(2):
        a, b = T.meta_var((one[vector(2 * p, lanes)], one[vector(2 * p + 1, lanes)]))
        two[vector(2 * p, lanes)] = vectors.interleave(a, b, lanes, 1, 0)
        two[vector(2 * p + 1, lanes)] = vectors.interleave(a, b, lanes, 1, 1)
    for p in T.unroll(2):
        a, b = T.meta_var((two[vector(p, lanes)], two[vector(2 + p, lanes)]))
        one[vector(2 * p, lanes)] = vectors.interleave(a, b, lanes, 2, 0)
        one[vector(2 * p + 1, lanes)] = vectors.interleave(a, b, lanes, 2, 1)


def _nibbles(packed: Expr) -> tuple[Expr, Expr]:
    return nibbles(lambda _offset, _width: T.reinterpret("uint8x64", packed), 0, WIDTH)


@script.inlined
def _unpack_quads(o, j, bytes, g):
    # p: quads of weight rows. A group of a row is one cache line: 16 times four packed bytes.
    for p in range(QUADS):
        one, two = script.buffers(2, FOUR * LANES, "int32")
        for v in T.unroll(FOUR):
            one[vector(v, LANES)] = T.reinterpret("int32x16", o.w[j + FOUR * p + v, ramp(g * HALF, HALF)])
        # Vector v then has the bytes v, 4 + v, 8 + v and 12 + v, each of all four rows. They are unpacked last.
        _transpose_fours(one, two, LANES)
        for v in T.unroll(FOUR):
            bytes[p, vector(v, WIDTH)] = _nibbles(one[vector(v, LANES)])[0]
            bytes[p, vector(FOUR + v, WIDTH)] = _nibbles(one[vector(v, LANES)])[1]


@script.inlined
def _widen_quads(groups, ws, j, factors):
    """Write the float16 scales of a tile as float32 to factors [groups, 48]."""
    for p in range(QUADS):
        for b in range(groups // FOUR):
            one, two = script.buffers(2, FOUR * FOUR)
            for v in T.unroll(FOUR):
                one[vector(v, FOUR)] = T.Cast("float32x4", ws[j + FOUR * p + v, vector(b, FOUR)])
            _transpose_fours(one, two, FOUR)
            for v in T.unroll(FOUR):
                factors[b * FOUR + v, vector(p, FOUR)] = one[vector(v, FOUR)]
        for g in range(groups % FOUR):
            for v in T.unroll(FOUR):
                factors[groups // FOUR * FOUR + g, FOUR * p + v] = T.Cast(
                    "float32", ws[j + FOUR * p + v, groups // FOUR * FOUR + g]
                )


def _all_rows(four: Expr) -> Expr:
    """Return four lanes four times."""
    return T.Shuffle([four] * FOUR, [*range(LANES)])


@script.inlined
def _begin_quads(rows, g, acc, h):
    for p in T.unroll(QUADS):
        acc[vector(p, LANES)] = rows.extra[h, g, ramp(0, LANES)]


@script.inlined
def _add_quad(rows, bytes, g, c, p, acc, h):
    weights = T.meta_var(_all_rows(T.reinterpret("int32x4", bytes[p, vector(c, LANES)])))
    acc[vector(p, LANES)] = vpdpbusd(
        acc[vector(p, LANES)], T.reinterpret("int8x64", weights), rows.xt[h, g * STEPS + c, ramp(0, WIDTH)], WIDTH
    )


@script.inlined
def _add_quads(factors, g, accs, total, h):
    # A group's sum is exact. Groups are added in ascending order, and the fence rounds each product first.
    for p in T.unroll(QUADS):
        total[vector(p, LANES)] = total[vector(p, LANES)] + fence(
            "float32x16", T.Cast("float32x16", accs[h][vector(p, LANES)]) * _all_rows(factors[g, vector(p, FOUR)])
        )


@script.inlined
def _clear_quads(total, _h):
    for p in T.unroll(QUADS):
        total[vector(p, LANES)] = T.Broadcast(T.float32(0), LANES)


@script.inlined
def _store_quads(o, rows, j, total, h):
    for p in T.unroll(QUADS):
        total[vector(p, LANES)] = total[vector(p, LANES)] * rows.scales[vector(h, LANES)]
        # Four lanes are adjacent columns of a row: one store. A repeated row stores the same again.
        for i in T.unroll(FOUR):
            o.y[rows.at[h * FOUR + i], ramp(j + FOUR * p, FOUR)] = total[ramp(p * LANES + FOUR * i, FOUR)]


@script.inlined
def _multiply_tile(count, groups, o, rows, j):
    """Write the products of 48 weight rows from j on with `count` vectors of rows of x; rows as of `few_buffers`."""
    ahead = T.meta_var(vectors.prefetch_distance(TILE, groups * HALF)[0])
    bytes = T.alloc_buffer((QUADS, QUAD_BYTES), "int8")
    # Scales are widened once per tile: they are read in every group.
    factors = T.alloc_buffer((groups, TILE), "float32")
    _widen_quads(groups, o.ws, j, factors)
    # A buffer for each vector of rows. The int32 sums of a group are what the registers hold.
    totals = script.buffers(count, QUADS * LANES)
    script.each(_clear_quads, totals)
    for g in range(groups):
        _unpack_quads(o, j, bytes, g)
        accs = script.buffers(count, QUADS * LANES, "int32")
        script.each(_begin_quads, accs, rows, g)
        # b, c: four inputs. p: unrolled, quads of weight rows. A broadcast of weights serves all vectors of rows.
        for b in range(STEPS // 2):
            # This group of the next tile comes to the second-level cache, and the next group of this tile to the first,
            # while products are added: three of the 48 rows at a time.
            for v in T.unroll(3):
                T.evaluate(vectors.prefetch(o.w[j + ahead + b * 3 + v, g * HALF]))
                T.evaluate(vectors.prefetch(o.w[j + b * 3 + v, (g + 1) * HALF], 1))
            for c in T.unroll(2):
                for p in T.unroll(QUADS):
                    script.each(_add_quad, accs, rows, bytes, g, 2 * b + c, p)
        script.each(_add_quads, totals, factors, g, accs)
    script.each(_store_quads, totals, o, rows, j)


@script.kernel
def few_w4a8(m: int, n: int, k: int) -> PrimFunc:
    """Return what `linear_w4a8` returns, for three to eight rows of x, 4 | k and n >= 48.

    Parallel over tiles of weight rows.
    """
    groups, packed = -(-k // GROUP), -(-k // GROUP) * HALF
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial

    @script.inlined
    def body(q, s, w, ws, y):
        o = script.temporaries(q=q, s=s, w=w, ws=ws, y=y)
        rows = few_buffers(-(-m // FOUR), groups)
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, tiles.nothing)
        _multiply_few_active(m, n, k, loop, o, rows, active)

    return tiles.integer_linear("linear_i4_few", (m, n, k), ((n, packed), "uint8"), ((n, groups), "float16"), body)


@script.inlined
def _multiply_few_active(m, n, k, loop, o, rows, active):
    # Without active rows there is no last one, which the places past it would repeat.
    if active.count[0] > 0:
        if m <= FOUR or active.count[0] <= FOUR:
            _multiply_few(1, n, k, loop, o, rows, active)
        else:
            _multiply_few(2, n, k, loop, o, rows, active)


@script.kernel
def gemm_w4a8(m: int, n: int, k: int) -> PrimFunc:
    """Return what `linear_w4a8` returns, for more than eight rows of x, 4 | k and n >= 48.

    Weights plus 8 are the unsigned factor; a group's sums begin with -8 times the sum of x. A panel's weights become
    bytes once. Up to eight active rows are multiplied as `few_w4a8` does. Parallel over blocks of rows while they
    are moved, then over panels of weight rows.
    """
    blocks, groups, packed = -(-m // LANES), -(-k // GROUP), -(-k // GROUP) * HALF
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    unpack, multiply = partial(_unpack, groups), partial(_multiply, groups)

    @script.inlined
    def body(q, s, w, ws, y):
        # rows to active are shared by all threads. The buffers of a panel below belong to one iteration.
        rows = tiles.blocks_of(m, groups * STEPS)
        # extra: what the sums of a group begin with.
        o = script.temporaries(q=q, s=s, w=w, ws=ws, y=y, rows=rows, extra=(blocks, groups, LANES, "int32"))
        few = few_buffers(2, groups)
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, tiles.nothing)
        # Up to eight active rows: vectors of 16 rows would be half empty.
        if active.count[0] <= ROWS:
            _multiply_few_active(m, n, k, loop, o, few, active)
        else:
            for block in loop(blocks):
                if block * LANES < active.count[0]:
                    tiles.move_rows(q, s, active, rows, block, k, False)
                    _row_sums(k, groups, rows.xt, o.extra, block)
            # panel: 64 weight rows, whose nibbles become bytes once and then meet all blocks of x.
            for panel in loop(-(-n // PANEL_ROWS)):
                # w: weights plus 8. ws: their scales.
                p = script.temporaries(
                    w=(PANEL_ROWS, groups * GROUP, "int8"),
                    ws=(PANEL_ROWS, groups, "float32"),
                    sums=(tiles.VECTORS * SUMS, "float32"),
                )
                tiles.for_panel(panel, n, tiles.most_blocks(m), unpack, multiply, (o, p), active)

    return tiles.integer_linear("linear_i4_rows", (m, n, k), ((n, packed), "uint8"), ((n, groups), "float16"), body)


@script.inlined
def _row_sums(k, groups, xt, extra, block):
    """Pad the rows with zeros, and write -8 times the sums of their groups."""
    # Zeros up to a whole group add nothing, whatever the weights are.
    for c in range(groups * STEPS - k // FOUR):
        xt[block, k // FOUR + c, ramp(0, WIDTH)] = T.Broadcast(T.int8(0), WIDTH)
    for g in range(groups):
        _zero_point(xt, extra, block, g)


@script.inlined
def _unpack(groups, o, p, j, at):
    """Unpack eight weight rows from j on to rows from `at` on of p.w and p.ws."""
    for r in range(WEIGHT_ROWS):
        tiles.widen_scales(o.ws, j + r, p.ws, at + r, groups)
        for g in range(groups):
            # Low nibbles are the first 64 inputs of a group and high nibbles the last 64.
            p.w[at + r, ramp(g * GROUP, HALF)] = nibbles(load_from(o.w, [j + r], g * HALF), 0, HALF)[0]
            p.w[at + r, ramp(g * GROUP + HALF, HALF)] = nibbles(load_from(o.w, [j + r], g * HALF), 0, HALF)[1]


@script.inlined
def _begin(o, place, g, acc, v):
    # The sums begin with the zero-point correction instead of 0.
    for r in T.unroll(WEIGHT_ROWS):
        acc[vector(r, LANES)] = o.extra[place.block + v, g, ramp(0, LANES)]


@script.inlined
def _add(o, p, place, c, r, acc, v):
    # Weights plus 8 are the unsigned factor, and x is the signed one.
    weights = T.meta_var(tiles.spread(p.w, place.at + r, c * FOUR))
    acc[vector(r, LANES)] = vpdpbusd(
        acc[vector(r, LANES)], weights, o.rows.xt[place.block + v, c, ramp(0, WIDTH)], WIDTH
    )


@script.inlined
def _add_group(p, place, g, totals, acc, v):
    # A group's sum is exact. Groups are added in float32 in ascending order, each product rounded by the fence.
    for r in T.unroll(WEIGHT_ROWS):
        totals[v][vector(r, LANES)] = totals[v][vector(r, LANES)] + fence(
            "float32x16", T.Cast("float32x16", acc[vector(r, LANES)]) * T.Broadcast(p.ws[place.at + r, g], LANES)
        )


@script.inlined
def _multiply_group(blocks, o, p, place, g, totals):
    # c: four inputs. r: unrolled, weight rows; all sums are in registers.
    # At most 3 * 8 sums: 24 of 32 registers. A buffer for each block of x.
    sums = script.buffers(blocks, SUMS, "int32")
    script.each(_begin, sums, o, place, g)
    for c in range(STEPS):
        for r in T.unroll(WEIGHT_ROWS):
            script.each(_add, sums, o, p, place, g * STEPS + c, r)
    script.each(_add_group, sums, p, place, g, totals)


@script.inlined
def _clear(total, _v):
    for r in T.unroll(WEIGHT_ROWS):
        total[vector(r, LANES)] = T.Broadcast(T.float32(0), LANES)


@script.inlined
def _finish(o, p, place, total, v):
    for r in T.unroll(WEIGHT_ROWS):
        p.sums[vector(v * WEIGHT_ROWS + r, LANES)] = (
            total[vector(r, LANES)] * o.rows.scales[vector(place.block + v, LANES)]
        )


@script.inlined
def _multiply(groups, blocks, o, p, place):
    """Write the tile of eight weight rows by `blocks` blocks of x."""
    # Totals are used once per group. The int32 sums of a group are what the registers hold.
    totals = script.buffers(blocks, SUMS)
    script.each(_clear, totals)
    # g: groups in ascending order, which fixes the order of the float32 sum.
    for g in range(groups):
        # A group of a weight row is one cache line.
        tiles.prefetch_panel(o.w, place, g * HALF)
        _multiply_group(blocks, o, p, place, g, totals)
    script.each(_finish, totals, o, p, place)
    tiles.store_blocks(o.y, o.rows, p.sums, (), 0, blocks, place)
