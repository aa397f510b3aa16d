"""int4 GEMM of a prefill chunk or a large batch with AVX-512 VNNI, bit for bit as `linear_w4a8`."""

from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.linear import tiles
from fastcar_compile.codegen.tvm.kernels.linear.tiles import FOUR, LANES, PANEL_ROWS, SUMS, WEIGHT_ROWS, WIDTH, in_turn
from fastcar_compile.codegen.tvm.kernels.linear.w4a8 import HALF, INT4_DOTS, Int4Sizes, few_rows, moved_rows, nibbles
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, fence, load_from, ramp, vector, vpdpbusd
from fastcar_compile.ir.ops.linear import GROUP

# int4 products of up to eight rows of x with AVX-512 VNNI, bit for bit as `linear_w4a8`.
#
# A vector holds the sums of eight rows of x with two weight rows: four inputs of both weight rows are one broadcast
# of eight bytes, and four inputs of every row of x stand twice. So no sum across lanes is needed.


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


ROWS = 8
"""Rows of x."""

FEW = 4
"""Active rows that are multiplied as `linear_w4a8` does: padding them to eight would cost more."""

PAIRS = 12
"""Pairs of weight rows of a tile: as many sums as the latency of vpdpbusd needs, and a few more."""

TILE = 2 * PAIRS
STEPS = GROUP // FOUR


def pair_buffers(groups: int) -> Any:
    """Allocate the moved rows of x."""
    return script.temporaries(
        # The rows in fours, each twice; what the sums of a group begin with.
        xt=(groups * STEPS, WIDTH, "int8"),
        extra=(groups, LANES, "int32"),
        # Scales of the rows, each twice; numbers of the rows, beyond the last, of the last.
        scales=(LANES, "float32"),
        at=(ROWS, "int32"),
    )


@script.inlined
def _multiply_pairs(n, k, loop, o, p, active):
    """Write the products of at most eight active rows; p as of `pair_buffers`."""
    _move_few_rows(k, -(-k // GROUP), o.q, o.s, active, p)
    # j: tiles of 24 weight rows. The last one begins at n - 24, and its overlap is computed twice, alike.
    for j in loop(-(-n // TILE)):
        _multiply_tile(-(-k // GROUP), o, p, T.min(j * TILE, n - TILE))


@script.inlined
def _move_few_rows(k, groups, q, s, active, p):
    """Move the active rows of q int8 [m, k], at most eight, and add up groups."""
    # i: eight places, of which those past the last active row repeat it. c: four inputs, written twice.
    for i in range(ROWS):
        p.at[i] = active.rows[T.min(i, active.count[0] - 1)]
        # Row i has the lanes 2 i and 2 i + 1, one for each weight row of a pair.
        p.scales[2 * i] = s[p.at[i]]
        p.scales[2 * i + 1] = s[p.at[i]]
        for c in range(k // FOUR):
            p.xt[c, ramp(i * 2 * FOUR, FOUR)] = q[p.at[i], ramp(c * FOUR, FOUR)]
            p.xt[c, ramp(i * 2 * FOUR + FOUR, FOUR)] = q[p.at[i], ramp(c * FOUR, FOUR)]
    # Zeros up to a whole group add nothing, whatever the weights are.
    for c in range(groups * STEPS - k // FOUR):
        p.xt[k // FOUR + c, ramp(0, WIDTH)] = T.Broadcast(T.int8(0), WIDTH)
    # g: groups. Weights are 8 too large, so the sums begin with -8 times the sum of the inputs.
    for g in range(groups):
        sums = T.alloc_buffer((LANES,), "int32")
        sums[vector(0, LANES)] = T.Broadcast(0, LANES)
        for c in range(STEPS):
            sums[vector(0, LANES)] = vpdpbusd(
                sums[vector(0, LANES)], T.Broadcast(T.int8(8), WIDTH), p.xt[g * STEPS + c, ramp(0, WIDTH)], WIDTH
            )
        p.extra[g, ramp(0, LANES)] = T.Broadcast(0, LANES) - sums[vector(0, LANES)]


def _dwords(o: Any, row: Expr, g: Expr, which: int) -> Expr:
    # 64 nibbles as bytes are 16 lanes of four inputs.
    return T.reinterpret("int32x16", nibbles(load_from(o.w, [row], g * HALF), 0, HALF)[which])


def _in_fours(two: Any, half: int) -> Expr:
    return T.reinterpret("int8x64", in_turn(two[vector(0, LANES)], two[vector(1, LANES)], 1, half))


@script.inlined
def _unpack_pairs(o, j, bytes, g, ahead):
    # Fours of both weight rows in turn: 16 of the low nibbles, then of the high ones.
    # p: pairs of weight rows. v: unrolled, the two rows. A group of a row is one cache line.
    for p in range(PAIRS):
        low, high = script.buffers(2, 2 * LANES, "int32")
        for v in T.unroll(2):
            T.evaluate(vectors.prefetch(o.w[j + ahead + 2 * p + v, g * HALF]))
            low[vector(v, LANES)] = _dwords(o, j + 2 * p + v, g, 0)
            high[vector(v, LANES)] = _dwords(o, j + 2 * p + v, g, 1)
        bytes[p, ramp(0, WIDTH)] = _in_fours(low, 0)
        bytes[p, ramp(WIDTH, WIDTH)] = _in_fours(low, 1)
        bytes[p, ramp(2 * WIDTH, WIDTH)] = _in_fours(high, 0)
        bytes[p, ramp(3 * WIDTH, WIDTH)] = _in_fours(high, 1)


def _both(bytes: Any, p: Expr, c: Expr) -> Expr:
    # Four inputs of the first weight row, then four of the second: eight bytes, repeated for eight rows of x.
    eight = T.reinterpret("int64", bytes[p, ramp(c * 2 * FOUR, 2 * FOUR)])
    return T.reinterpret("int8x64", T.Broadcast(eight, ROWS))


def _both_scales(factors: Any, p: Expr, g: Expr) -> Expr:
    # Even lanes get the scale of the first weight row, odd lanes that of the second.
    first, second = (T.Broadcast(factors[2 * p + v, g], LANES) for v in range(2))
    return in_turn(first, second, 1, 0)


@script.inlined
def _add_pairs(rows, bytes, factors, totals, g):
    acc = T.alloc_buffer((PAIRS * LANES,), "int32")
    for p in T.unroll(PAIRS):
        acc[vector(p, LANES)] = rows.extra[g, ramp(0, LANES)]
    # c: four inputs. p: unrolled, pairs of weight rows; all sums are in registers.
    for c in range(STEPS):
        for p in T.unroll(PAIRS):
            acc[vector(p, LANES)] = vpdpbusd(
                acc[vector(p, LANES)], _both(bytes, p, c), rows.xt[g * STEPS + c, ramp(0, WIDTH)], WIDTH
            )
    # A group's sum is exact. Groups are added in ascending order, and the fence rounds each product first.
    for p in T.unroll(PAIRS):
        totals[vector(p, LANES)] = totals[vector(p, LANES)] + fence(
            "float32x16", T.Cast("float32x16", acc[vector(p, LANES)]) * _both_scales(factors, p, g)
        )


@script.inlined
def _multiply_tile(groups, o, rows, j):
    """Write the products of 24 weight rows from j on; rows as of `pair_buffers`."""
    bytes = T.alloc_buffer((PAIRS, 4 * WIDTH), "int8")
    # Scales are widened once per tile: they are read in every group.
    factors = T.alloc_buffer((TILE, groups), "float32")
    for r in range(TILE):
        tiles.widen_scales(o.ws, j + r, factors, r, groups)
    # 12 vectors of totals and 12 of sums fit the 32 registers.
    totals = T.alloc_buffer((PAIRS * LANES,), "float32")
    for p in T.unroll(PAIRS):
        totals[vector(p, LANES)] = T.Broadcast(T.float32(0), LANES)
    for g in range(groups):
        _unpack_pairs(o, j, bytes, g, vectors.prefetch_distance(TILE, groups * HALF)[0])
        _add_pairs(rows, bytes, factors, totals, g)
    for p in T.unroll(PAIRS):
        totals[vector(p, LANES)] = totals[vector(p, LANES)] * rows.scales[vector(0, LANES)]
        # Lanes 2 i and 2 i + 1 are adjacent columns of row i: one store. A repeated row stores the same again.
        for i in T.unroll(ROWS):
            o.y[rows.at[i], ramp(j + 2 * p, 2)] = totals[ramp(p * LANES + 2 * i, 2)]


@script.kernel
def pairs_w4a8(m: int, n: int, k: int, isa: InstructionSet) -> PrimFunc:
    """Return what `linear_w4a8` returns, for five to eight rows of x, 4 | k and n >= 24.

    Parallel over tiles of weight rows.
    """
    groups, packed = -(-k // GROUP), -(-k // GROUP) * HALF
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    few_loop = T.parallel if n * k >= tiles.PARALLEL_WEIGHTS else T.serial
    move, few = few_rows(Int4Sizes(FEW, n, k, INT4_DOTS[isa.int8]), few_loop)

    @script.inlined
    def body(q, s, w, ws, y):
        o = moved_rows(FEW, k, q=q, s=s, w=w, ws=ws, y=y)
        rows = pair_buffers(groups)
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, tiles.nothing)
        # Up to FEW rows: sums across lanes cost less than padding the rows to eight.
        if active.count[0] <= FEW:
            for i in range(active.count[0]):
                move(o, active.rows[i], i)
            few(o, active)
        else:
            _multiply_pairs(n, k, loop, o, rows, active)

    return tiles.integer_linear("linear_i4_pairs", (m, n, k), ((n, packed), "uint8"), ((n, groups), "float16"), body)


@script.kernel
def gemm_w4a8(m: int, n: int, k: int, isa: InstructionSet) -> PrimFunc:
    """Return what `linear_w4a8` returns, for more than eight rows of x, 4 | k and n >= 24.

    Weights plus 8 are the unsigned factor; a group's sums begin with -8 times the sum of x. A panel's weights become
    bytes once. Up to eight active rows are multiplied in pairs of weight rows. Parallel over blocks of rows while they
    are moved, then over panels of weight rows.
    """
    del isa  # AVX-512 VNNI alone has these vectors
    blocks, groups, packed = -(-m // LANES), -(-k // GROUP), -(-k // GROUP) * HALF
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    unpack, multiply = partial(_unpack, groups), partial(_multiply, groups)

    @script.inlined
    def body(q, s, w, ws, y):
        # rows to active are shared by all threads. The buffers of a panel below belong to one iteration.
        rows = tiles.blocks_of(m, groups * STEPS)
        # extra: what the sums of a group begin with.
        o = script.temporaries(q=q, s=s, w=w, ws=ws, y=y, rows=rows, extra=(blocks, groups, LANES, "int32"))
        few = pair_buffers(groups)
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, tiles.nothing)
        # Up to eight active rows: vectors of 16 rows would be half empty.
        if active.count[0] <= ROWS:
            _multiply_pairs(n, k, loop, o, few, active)
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
    # g: groups. A vpdpbusd with the constant 8 adds 8 times four inputs of each of 16 rows.
    for g in range(groups):
        extra[block, g, ramp(0, LANES)] = T.Broadcast(0, LANES)
        for c in range(STEPS):
            four = T.meta_var(xt[block, g * STEPS + c, ramp(0, WIDTH)])
            extra[block, g, ramp(0, LANES)] = vpdpbusd(
                extra[block, g, ramp(0, LANES)], T.Broadcast(T.int8(8), WIDTH), four, WIDTH
            )
        # Weights are 8 too large, so this zero-point correction is what the sums begin with.
        extra[block, g, ramp(0, LANES)] = T.Broadcast(0, LANES) - extra[block, g, ramp(0, LANES)]


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
    tiles.store_blocks(o.y, o.rows, p.sums, blocks, place)
