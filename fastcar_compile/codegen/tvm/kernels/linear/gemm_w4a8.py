"""int4 GEMM of a prefill chunk or a large batch with AVX-512 VNNI, bit for bit as `linear_w4a8`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS
from fastcar_compile.codegen.tvm.kernels.linear.rows import (
    FOUR,
    LANES,
    PANEL,
    PANEL_ROWS,
    SUMS,
    VECTORS,
    WEIGHT_ROWS,
    ActiveRows,
    Rows,
    Sums,
    TileMacros,
    ZeroRows,
    find_active,
    first_row,
    for_panel,
    in_turn,
    move_rows,
    spread,
    store_blocks,
    widen_scales,
)
from fastcar_compile.codegen.tvm.kernels.linear.w4a8 import HALF, Few, nibbles
from fastcar_compile.codegen.tvm.kernels.script import access, inlined, kernel
from fastcar_compile.codegen.tvm.kernels.vectors import (
    Expr,
    fence,
    load_from,
    prefetch,
    prefetch_distance,
    ramp,
    vector,
    vpdpbusd,
)
from fastcar_compile.ir.ops.linear import GROUP

# int4 products of up to eight rows of x with AVX-512 VNNI, bit for bit as `linear_w4a8`.
#
# A vector holds the sums of eight rows of x with two weight rows: four inputs of both weight rows are one broadcast
# of
# eight bytes, and four inputs of every row of x stand twice. So no sum across lanes is needed.


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


ROWS = 8
"""Rows of x."""

FEW = 4
"""Active rows that are multiplied as `linear_w4a8` does: padding them to eight would cost more."""

PAIRS = 12
"""Pairs of weight rows of a tile: as many sums as the latency of vpdpbusd needs, and a few more."""

TILE = 2 * PAIRS
WIDTH = 64
STEPS = GROUP // FOUR


@dataclass(frozen=True)
class PairOperands:
    """w uint8 [n, 64 G], ws float16 [n, G], y float32 [m, n], and temporaries.

    Args:
        xt: int8 [32 G, 64], the rows in fours, each twice. extra: int32 [G, 16], with which the sums of a group begin.
        scales: float32 [16], of the rows, each twice. at: int32 [8], numbers of the rows; beyond the last, of the last.
    """

    xt: Any
    extra: Any
    scales: Any
    at: Any
    w: Any
    ws: Any
    y: Any


def move_few_rows(k: int) -> Any:
    """Return the macro (q, s, active, o): moves the active rows of q int8 [m, k], at most eight, and adds up groups."""
    groups = -(-k // GROUP)

    @inlined
    def move(q, s, active, o):
        # i: eight places, of which those past the last active row repeat it. c: four inputs, written twice.
        for i in range(ROWS):
            o.at[i] = active.rows[T.min(i, active.count[0] - 1)]
            # Row i has the lanes 2 i and 2 i + 1, one for each weight row of a pair.
            o.scales[2 * i] = s[o.at[i]]
            o.scales[2 * i + 1] = s[o.at[i]]
            for c in range(k // FOUR):
                o.xt[c, ramp(i * 2 * FOUR, FOUR)] = q[o.at[i], ramp(c * FOUR, FOUR)]
                o.xt[c, ramp(i * 2 * FOUR + FOUR, FOUR)] = q[o.at[i], ramp(c * FOUR, FOUR)]
        # Zeros up to a whole group add nothing, whatever the weights are.
        for c in range(groups * STEPS - k // FOUR):
            o.xt[k // FOUR + c, ramp(0, WIDTH)] = T.Broadcast(T.int8(0), WIDTH)
        # g: groups. Weights are 8 too large, so the sums begin with -8 times the sum of the inputs.
        for g in range(groups):
            sums = T.alloc_buffer((LANES,), "int32")
            sums[vector(0, LANES)] = T.Broadcast(0, LANES)
            for c in range(STEPS):
                sums[vector(0, LANES)] = vpdpbusd(
                    sums[vector(0, LANES)], T.Broadcast(T.int8(8), WIDTH), o.xt[g * STEPS + c, ramp(0, WIDTH)], WIDTH
                )
            o.extra[g, ramp(0, LANES)] = T.Broadcast(0, LANES) - sums[vector(0, LANES)]

    return move


def pair_tile(n: int, groups: int) -> Any:
    """Return the macro (o, j): 24 weight rows from j on."""
    rows_ahead, _ = prefetch_distance(TILE, groups * HALF)

    def dwords(o: PairOperands, row: Expr, g: Expr, which: int) -> Expr:
        # 64 nibbles as bytes are 16 lanes of four inputs.
        return T.reinterpret("int32x16", nibbles(load_from(o.w, [row], g * HALF), 0, HALF)[which])

    def in_fours(two: Any, half: int) -> Expr:
        return T.reinterpret("int8x64", in_turn(two[vector(0, LANES)], two[vector(1, LANES)], 1, half))

    @inlined
    def unpack(o, j, bytes, g):
        # Fours of both weight rows in turn: 16 of the low nibbles, then of the high ones.
        # p: pairs of weight rows. v: unrolled, the two rows. A group of a row is one cache line.
        for p in range(PAIRS):
            low = T.alloc_buffer((2 * LANES,), "int32")
            high = T.alloc_buffer((2 * LANES,), "int32")
            for v in T.unroll(2):
                T.evaluate(prefetch(o.w[j + rows_ahead + 2 * p + v, g * HALF]))
                low[vector(v, LANES)] = dwords(o, j + 2 * p + v, g, 0)
                high[vector(v, LANES)] = dwords(o, j + 2 * p + v, g, 1)
            bytes[p, ramp(0, WIDTH)] = in_fours(low, 0)
            bytes[p, ramp(WIDTH, WIDTH)] = in_fours(low, 1)
            bytes[p, ramp(2 * WIDTH, WIDTH)] = in_fours(high, 0)
            bytes[p, ramp(3 * WIDTH, WIDTH)] = in_fours(high, 1)

    def both(bytes: Any, p: Expr, c: Expr) -> Expr:
        # Four inputs of the first weight row, then four of the second: eight bytes, repeated for eight rows of x.
        eight = T.reinterpret("int64", bytes[p, ramp(c * 2 * FOUR, 2 * FOUR)])
        return T.reinterpret("int8x64", T.Broadcast(eight, ROWS))

    def both_scales(factors: Any, p: Expr, g: Expr) -> Expr:
        # Even lanes get the scale of the first weight row, odd lanes that of the second.
        first, second = (T.Broadcast(factors[2 * p + v, g], LANES) for v in range(2))
        return in_turn(first, second, 1, 0)

    @inlined
    def group(o, bytes, factors, totals, g):
        acc = T.alloc_buffer((PAIRS * LANES,), "int32")
        for p in T.unroll(PAIRS):
            acc[vector(p, LANES)] = o.extra[g, ramp(0, LANES)]
        # c: four inputs. p: unrolled, pairs of weight rows; all sums are in registers.
        for c in range(STEPS):
            for p in T.unroll(PAIRS):
                acc[vector(p, LANES)] = vpdpbusd(
                    acc[vector(p, LANES)], both(bytes, p, c), o.xt[g * STEPS + c, ramp(0, WIDTH)], WIDTH
                )
        # A group's sum is exact. Groups are added in ascending order, and the fence rounds each product first.
        for p in T.unroll(PAIRS):
            totals[vector(p, LANES)] = totals[vector(p, LANES)] + fence(
                "float32x16", T.Cast("float32x16", acc[vector(p, LANES)]) * both_scales(factors, p, g)
            )

    @inlined
    def multiply(o, j):
        bytes = T.alloc_buffer((PAIRS, 4 * WIDTH), "int8")
        # Scales are widened once per tile: they are read in every group.
        factors = T.alloc_buffer((TILE, groups), "float32")
        for r in range(TILE):
            widen_scales(o.ws, j + r, factors, r, groups)
        # 12 vectors of totals and 12 of sums fit the 32 registers.
        totals = T.alloc_buffer((PAIRS * LANES,), "float32")
        for p in T.unroll(PAIRS):
            totals[vector(p, LANES)] = T.Broadcast(T.float32(0), LANES)
        for g in range(groups):
            unpack(o, j, bytes, g)
            group(o, bytes, factors, totals, g)
        for p in T.unroll(PAIRS):
            totals[vector(p, LANES)] = totals[vector(p, LANES)] * o.scales[vector(0, LANES)]
            # Lanes 2 i and 2 i + 1 are adjacent columns of row i: one store. A repeated row stores the same again.
            for i in T.unroll(ROWS):
                o.y[o.at[i], ramp(j + 2 * p, 2)] = totals[ramp(p * LANES + 2 * i, 2)]

    return multiply


@kernel
def pairs_w4a8(m: int, n: int, k: int, isa: InstructionSet) -> PrimFunc:
    """Return what `linear_w4a8` returns, for five to eight rows of x, 4 | k and n >= 24.

    Parallel over tiles of weight rows.
    """
    groups = -(-k // GROUP)
    packed, padded = groups * HALF, groups * GROUP
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial
    few, move, multiply = Few.of(FEW, n, k, isa), move_few_rows(k), pair_tile(n, groups)

    @script.prim_func(private=True, s_tir=True)
    def linear_i4_pairs(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, packed), "uint8"),
        ws: T.Buffer((n, groups), "float16"),
        y: T.Buffer((m, n), "float32"),
    ):
        with T.sblock("product"):
            access([q, s, w, ws], [y])
            x = T.alloc_buffer((FEW, padded), "int8")
            correction = T.alloc_buffer((FEW, groups), "int32")
            xt = T.alloc_buffer((groups * STEPS, WIDTH), "int8")
            extra = T.alloc_buffer((groups, LANES), "int32")
            scales = T.alloc_buffer((LANES,), "float32")
            at = T.alloc_buffer((ROWS,), "int32")
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")
            find_active(q, (m, n, k), ActiveRows(active, count), ZeroRows(y, s))
            # Up to FEW rows: sums across lanes cost less than padding the rows to eight.
            if count[0] <= FEW:
                few.multiply(q, few.operands(x, s, w, ws, y, correction, active), count[0])
            else:
                move(q, s, ActiveRows(active, count), PairOperands(xt, extra, scales, at, w, ws, y))
                # j: tiles of 24 weight rows. The last one begins at n - 24, and its overlap is computed twice, alike.
                for j in loop(-(-n // TILE)):
                    multiply(PairOperands(xt, extra, scales, at, w, ws, y), T.min(j * TILE, n - TILE))

    return linear_i4_pairs


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


@dataclass(frozen=True)
class _Operands:
    """packed uint8 [n, 64 G], y float32 [m, n], and the panel's temporaries.

    Args:
        extra: int32 [blocks, G, 16], with which the sums of a group begin. w: int8 [64, 128 G], weights plus 8.
        ws: float32 [64, G]. sums: float32 [3 * 8 * 16].
    """

    rows: Rows
    extra: Any
    packed: Any
    w: Any
    ws: Any
    y: Any
    sums: Any


@kernel
def gemm_w4a8(m: int, n: int, k: int, isa: InstructionSet) -> PrimFunc:
    """Return what `linear_w4a8` returns, for more than eight rows of x, 4 | k and n >= 24.

    Weights plus 8 are the unsigned factor; a group's sums begin with -8 times the sum of x. A panel's weights become
    bytes once. Up to eight active rows are multiplied in pairs of weight rows. Parallel over blocks of rows while they
    are moved, then over panels of weight rows.
    """
    blocks, groups = -(-m // LANES), -(-k // GROUP)
    padded, packed = groups * GROUP, groups * HALF
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial
    move_few, multiply_few, row_sums, unpack = move_few_rows(k), pair_tile(n, groups), _row_sums(k), _unpack(groups)
    tiles = TileMacros.of(m, partial(_multiply, groups))

    @script.prim_func(private=True, s_tir=True)
    def linear_i4_rows(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, packed), "uint8"),
        ws: T.Buffer((n, groups), "float16"),
        y: T.Buffer((m, n), "float32"),
    ):
        with T.sblock("product"):
            access([q, s, w, ws], [y])
            # xt to count are shared by all threads. The buffers of a panel below belong to one iteration.
            xt = T.alloc_buffer((blocks, padded // FOUR, FOUR * LANES), "int8")
            at = T.alloc_buffer((blocks * LANES,), "int32")
            scales = T.alloc_buffer((blocks * LANES,), "float32")
            extra = T.alloc_buffer((blocks, groups, LANES), "int32")
            few = T.alloc_buffer((groups * STEPS, WIDTH), "int8")
            sums = T.alloc_buffer((groups, LANES), "int32")
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")
            find_active(q, (m, n, k), ActiveRows(active, count), ZeroRows(y, s))
            # Up to eight active rows: vectors of 16 rows would be half empty.
            if count[0] <= ROWS:
                move_few(q, s, ActiveRows(active, count), PairOperands(few, sums, scales, at, w, ws, y))
                for j in loop(-(-n // TILE)):
                    multiply_few(PairOperands(few, sums, scales, at, w, ws, y), T.min(j * TILE, n - TILE))
            else:
                for block in loop(blocks):
                    if block * LANES < count[0]:
                        move_rows(q, s, ActiveRows(active, count), Rows(xt, at, scales), block, k, False)
                        row_sums(xt, extra, block)
                # panel: 64 weight rows, whose nibbles become bytes once and then meet all blocks of x.
                for panel in loop(-(-n // PANEL_ROWS)):
                    bytes = T.alloc_buffer((PANEL_ROWS, padded), "int8")
                    factors = T.alloc_buffer((PANEL_ROWS, groups), "float32")
                    totals = T.alloc_buffer((VECTORS * SUMS,), "float32")
                    for t in range(PANEL):
                        if panel * PANEL_ROWS + t * WEIGHT_ROWS < n:
                            unpack(w, ws, first_row(panel, t, n), bytes, factors, t * WEIGHT_ROWS)
                    for_panel(
                        panel,
                        n,
                        (count[0] + LANES - 1) // LANES,
                        tiles,
                        _Operands(Rows(xt, at, scales), extra, w, bytes, factors, y, totals),
                    )

    return linear_i4_rows


def _row_sums(k: int) -> Any:
    """Return the macro (xt, extra, block): pads the rows with zeros; -8 times the sums of their groups."""
    groups = -(-k // GROUP)

    @inlined
    def row_sums(xt, extra, block):
        # Zeros up to a whole group add nothing, whatever the weights are.
        for c in range(groups * STEPS - k // FOUR):
            xt[block, k // FOUR + c, ramp(0, WIDTH)] = T.Broadcast(T.int8(0), WIDTH)
        # g: groups. A vpdpbusd with the constant 8 adds 8 times four inputs of each of 16 rows.
        for g in range(groups):
            extra[block, g, ramp(0, LANES)] = T.Broadcast(0, LANES)
            for c in range(STEPS):
                extra[block, g, ramp(0, LANES)] = vpdpbusd(
                    extra[block, g, ramp(0, LANES)],
                    T.Broadcast(T.int8(8), WIDTH),
                    xt[block, g * STEPS + c, ramp(0, WIDTH)],
                    WIDTH,
                )
            # Weights are 8 too large, so this zero-point correction is what the sums begin with.
            extra[block, g, ramp(0, LANES)] = T.Broadcast(0, LANES) - extra[block, g, ramp(0, LANES)]

    return row_sums


def _unpack(groups: int) -> Any:
    """Return the macro (w, ws, j, bytes, factors, at): eight weight rows from j on, to rows from `at` on."""

    @inlined
    def unpack(w, ws, j, bytes, factors, at):
        for r in range(WEIGHT_ROWS):
            widen_scales(ws, j + r, factors, at + r, groups)
            for g in range(groups):
                # Low nibbles are the first 64 inputs of a group and high nibbles the last 64.
                bytes[at + r, ramp(g * GROUP, HALF)] = nibbles(load_from(w, [j + r], g * HALF), 0, HALF)[0]
                bytes[at + r, ramp(g * GROUP + HALF, HALF)] = nibbles(load_from(w, [j + r], g * HALF), 0, HALF)[1]

    return unpack


def _multiply(groups: int, vectors: int) -> Any:
    """Return the macro (o, place): the tile of eight weight rows by `vectors` blocks of x."""

    @inlined
    def begin(o, place, acc, g, v):
        # The sums begin with the zero-point correction instead of 0.
        for r in T.unroll(WEIGHT_ROWS):
            acc[vector(r, LANES)] = o.extra[place.block + v, g, ramp(0, LANES)]

    @inlined
    def add(o, place, acc, c, r, v):
        # Weights plus 8 are the unsigned factor, and x is the signed one.
        acc[vector(r, LANES)] = vpdpbusd(
            acc[vector(r, LANES)],
            spread(o.w, place.at + r, c * FOUR),
            o.rows.xt[place.block + v, c, ramp(0, WIDTH)],
            WIDTH,
        )

    @inlined
    def add_group(o, place, acc, total, g):
        # A group's sum is exact. Groups are added in float32 in ascending order, each product rounded by the fence.
        for r in T.unroll(WEIGHT_ROWS):
            total[vector(r, LANES)] = total[vector(r, LANES)] + fence(
                "float32x16",
                T.Cast("float32x16", acc[vector(r, LANES)]) * T.Broadcast(o.ws[place.at + r, g], LANES),
            )

    @inlined
    def prefetch_next(o, place, g):
        # The first tile of x prefetches the next panel: a group of a weight row is one cache line.
        if place.block == 0:
            for r in T.unroll(WEIGHT_ROWS):
                T.evaluate(prefetch(o.packed[place.j + PANEL_ROWS + r, g * HALF]))

    @inlined
    def group(o, place, g, totals):
        # c: four inputs. r: unrolled, weight rows; all sums are in registers.
        # At most 3 * 8 sums: 24 of 32 registers. Three buffers, because one would be too large for the stack.
        first = T.alloc_buffer((SUMS,), "int32")
        second = T.alloc_buffer((SUMS,), "int32")
        third = T.alloc_buffer((SUMS,), "int32")
        begin(o, place, first, g, 0)
        # `vectors` is a number, so these branches are decided when the kernel is made.
        if vectors > 1:
            begin(o, place, second, g, 1)
        if vectors > 2:
            begin(o, place, third, g, 2)
        for c in range(STEPS):
            for r in T.unroll(WEIGHT_ROWS):
                add(o, place, first, g * STEPS + c, r, 0)
                if vectors > 1:
                    add(o, place, second, g * STEPS + c, r, 1)
                if vectors > 2:
                    add(o, place, third, g * STEPS + c, r, 2)
        add_group(o, place, first, totals.first, g)
        if vectors > 1:
            add_group(o, place, second, totals.second, g)
        if vectors > 2:
            add_group(o, place, third, totals.third, g)

    @inlined
    def finish(o, place, total, v):
        for r in T.unroll(WEIGHT_ROWS):
            o.sums[vector(v * WEIGHT_ROWS + r, LANES)] = (
                total[vector(r, LANES)] * o.rows.scales[vector(place.block + v, LANES)]
            )

    @inlined
    def multiply(o, place):
        # Totals are used once per group. The int32 sums of a group are what the registers hold.
        first = T.alloc_buffer((SUMS,), "float32")
        second = T.alloc_buffer((SUMS,), "float32")
        third = T.alloc_buffer((SUMS,), "float32")
        for r in T.unroll(WEIGHT_ROWS):
            first[vector(r, LANES)] = T.Broadcast(T.float32(0), LANES)
            second[vector(r, LANES)] = T.Broadcast(T.float32(0), LANES)
            third[vector(r, LANES)] = T.Broadcast(T.float32(0), LANES)
        # g: groups in ascending order, which fixes the order of the float32 sum.
        for g in range(groups):
            prefetch_next(o, place, g)
            group(o, place, g, Sums(first, second, third))
        finish(o, place, first, 0)
        if vectors > 1:
            finish(o, place, second, 1)
        if vectors > 2:
            finish(o, place, third, 2)
        store_blocks(o.y, o.rows, o.sums, vectors, place)

    return multiply
