"""int8 GEMM of a prefill chunk or a large batch with AVX-512 VNNI, bit for bit as `linear_w8a8`."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

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
    move_rows,
    spread,
    store_blocks,
)
from fastcar_compile.codegen.tvm.kernels.linear.w8a8 import Few
from fastcar_compile.codegen.tvm.kernels.script import access, inlined, kernel
from fastcar_compile.codegen.tvm.kernels.vectors import prefetch, ramp, reduce_add, vector, vpdpbusd

WIDTH = 64


@dataclass(frozen=True)
class _Operands:
    """w int8 [n, k], ws float32 [n], y float32 [m, n].

    Args:
        extra: int32 [64], what is added to the panel's sums. sums: float32 [3 * 8 * 16].
    """

    rows: Rows
    w: Any
    ws: Any
    y: Any
    extra: Any
    sums: Any


@kernel
def gemm_w8a8(m: int, n: int, k: int, isa: InstructionSet) -> PrimFunc:
    """Return what `linear_w8a8` returns, for more rows of x than a few, 4 | k and n >= 8.

    x + 128 is the unsigned factor, so that a weight is a signed broadcast; -128 times the sum of a weight row is added.
    Where only a few rows are active, they are multiplied as `linear_w8a8` does. Parallel over blocks of rows while they
    are moved, then over panels of weight rows.
    """
    blocks = -(-m // LANES)
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial
    few, weight_sums = Few.of(n, k, isa), _weight_sums(k)
    tiles = TileMacros.of(m, partial(_multiply, n, k))

    @script.prim_func(private=True, s_tir=True)
    def linear_i8_rows(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, k), "int8"),
        ws: T.Buffer((n,), "float32"),
        y: T.Buffer((m, n), "float32"),
    ):
        with T.sblock("product"):
            access([q, s, w, ws], [y])
            # xt to count are shared by all threads. The buffers of a panel below belong to one iteration.
            xt = T.alloc_buffer((blocks, k // FOUR, FOUR * LANES), "int8")
            at = T.alloc_buffer((blocks * LANES,), "int32")
            scales = T.alloc_buffer((blocks * LANES,), "float32")
            correction = T.alloc_buffer((m,), "int32")
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")
            find_active(q, (m, n, k), ActiveRows(active, count), ZeroRows(y, s, ws))
            # Few active rows: vectors of 16 rows would be at least half empty.
            if count[0] <= few.most:
                few.multiply(few.operands(q, s, w, ws, y, correction, active), count[0])
            else:
                for block in loop(blocks):
                    if block * LANES < count[0]:
                        move_rows(q, s, ActiveRows(active, count), Rows(xt, at, scales), block, k, True)
                # panel: 64 weight rows, which meet all blocks of x while they are in the second-level cache.
                for panel in loop(-(-n // PANEL_ROWS)):
                    extra = T.alloc_buffer((PANEL_ROWS,), "int32")
                    sums = T.alloc_buffer((VECTORS * SUMS,), "float32")
                    for t in range(PANEL):
                        if panel * PANEL_ROWS + t * WEIGHT_ROWS < n:
                            weight_sums(w, first_row(panel, t, n), extra, t * WEIGHT_ROWS)
                    for_panel(
                        panel,
                        n,
                        (count[0] + LANES - 1) // LANES,
                        tiles,
                        _Operands(Rows(xt, at, scales), w, ws, y, extra, sums),
                    )

    return linear_i8_rows


def _weight_sums(k: int) -> Any:
    """Return the macro (w, j, extra, at): -128 times the sums of eight weight rows from j on, to extra[at ..]."""
    steps = k // WIDTH

    @inlined
    def weight_sums(w, j, extra, at):
        sums = T.alloc_buffer((WEIGHT_ROWS * LANES,), "int32")
        # Eight weight rows are eight independent sums, which hide the latency of vpdpbusd.
        for r in T.unroll(WEIGHT_ROWS):
            sums[vector(r, LANES)] = T.Broadcast(0, LANES)
        # c: a cache line of each weight row. A vpdpbusd with ones adds four weights per lane.
        for c in range(steps):
            for r in T.unroll(WEIGHT_ROWS):
                sums[vector(r, LANES)] = vpdpbusd(
                    sums[vector(r, LANES)], T.Broadcast(T.int8(1), WIDTH), w[j + r, ramp(c * WIDTH, WIDTH)], WIDTH
                )
        for r in T.unroll(WEIGHT_ROWS):
            extra[at + r] = reduce_add(sums[vector(r, LANES)], LANES)
            for t in range(k % WIDTH):
                extra[at + r] += T.Cast("int32", w[j + r, steps * WIDTH + t])
            # x + 128 adds 128 times the weight row's sum. This is the zero-point correction.
            extra[at + r] = extra[at + r] * -128

    return weight_sums


def _multiply(n: int, k: int, vectors: int) -> Any:
    """Return the macro (o, place): the tile of eight weight rows by `vectors` blocks of x."""

    @inlined
    def begin(o, place, acc):
        # The sums begin with the zero-point correction instead of 0.
        for r in T.unroll(WEIGHT_ROWS):
            acc[vector(r, LANES)] = T.Broadcast(o.extra[place.at + r], LANES)

    @inlined
    def add(o, place, acc, c, r, v):
        # x + 128 is the unsigned factor, and four inputs of a weight row are broadcast as the signed one.
        acc[vector(r, LANES)] = vpdpbusd(
            acc[vector(r, LANES)],
            o.rows.xt[place.block + v, c, ramp(0, WIDTH)],
            spread(o.w, place.j + r, c * FOUR),
            WIDTH,
        )

    @inlined
    def add_all(o, place, sums, c):
        # r: unrolled. A broadcast of weights serves up to three blocks of 16 rows.
        for r in T.unroll(WEIGHT_ROWS):
            add(o, place, sums.first, c, r, 0)
            if vectors > 1:
                add(o, place, sums.second, c, r, 1)
            if vectors > 2:
                add(o, place, sums.third, c, r, 2)

    @inlined
    def prefetch_next(o, place, line):
        # The first tile of x prefetches the next panel's weights.
        if place.block == 0:
            for r in T.unroll(WEIGHT_ROWS):
                T.evaluate(prefetch(o.w[place.j + PANEL_ROWS + r, line * WIDTH]))

    @inlined
    def finish(o, place, acc, v):
        # The scales are multiplied first, as in `linear_w8a8`: the order decides the rounding.
        for r in T.unroll(WEIGHT_ROWS):
            o.sums[vector(v * WEIGHT_ROWS + r, LANES)] = T.Cast("float32x16", acc[vector(r, LANES)]) * (
                o.rows.scales[vector(place.block + v, LANES)] * T.Broadcast(o.ws[place.j + r], LANES)
            )

    @inlined
    def multiply(o, place):
        # Buffers as in `Sums`.
        first = T.alloc_buffer((SUMS,), "int32")
        second = T.alloc_buffer((SUMS,), "int32")
        third = T.alloc_buffer((SUMS,), "int32")
        begin(o, place, first)
        if vectors > 1:
            begin(o, place, second)
        if vectors > 2:
            begin(o, place, third)
        # line: cache lines of a weight row. c: four inputs. Weight rows are unrolled; all sums are in registers.
        for line in range(k // WIDTH):
            prefetch_next(o, place, line)
            for c in range(LANES):
                add_all(o, place, Sums(first, second, third), line * LANES + c)
        # The remainder of a cache line. 4 divides k, so fours remain.
        for c in range(k % WIDTH // FOUR):
            add_all(o, place, Sums(first, second, third), k // WIDTH * LANES + c)
        finish(o, place, first, 0)
        if vectors > 1:
            finish(o, place, second, 1)
        if vectors > 2:
            finish(o, place, third, 2)
        store_blocks(o.y, o.rows, o.sums, vectors, place)

    return multiply
