"""Sums of int8 products for every instruction set, exact in int32.

Lane widths and saturation are those of Intel's Intrinsics Guide and of Arm's Neon Intrinsics Reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet, Int8
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS, SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.linear.rows import (
    SCAN_LANES,
    ActiveRows,
    Tile,
    TileMacro,
    Tiling,
    append_active,
    for_tiles,
    is_zero,
    or_int8,
)
from fastcar_compile.codegen.tvm.kernels.script import access, inlined, kernel
from fastcar_compile.codegen.tvm.kernels.vectors import (
    Expr,
    Load,
    flip_sign,
    fold_fours,
    interleave_fours,
    intrinsic,
    load_from,
    prefetch,
    prefetch_distance,
    ramp,
    reduce_add,
    vector,
    vpdpbusd,
)


@dataclass(frozen=True)
class Int8Dot:
    """How a kernel adds up int8 products.

    Args:
        width: products of one step.
        lanes: int32 sums that a step adds to.
        unsigned: 128 is added to every weight. A step over zero weights gives the zero-point correction.
        accumulators: vectors of sums that fit the registers.
        streams: weight rows that are read in parallel for few activation rows. One where that was measured to be
            faster, several where they share a load of activations.
        step: (sums, weights, activations) -> sums.
    """

    width: int
    lanes: int
    unsigned: bool
    accumulators: int
    streams: int
    step: Callable[[Expr, Load, Load], Expr]


def _vpdpbusd(width: int) -> Callable[[Expr, Load, Load], Expr]:
    # Weights plus 128 are the unsigned factor, so the correction is one number per row of x.
    return lambda acc, w, q: vpdpbusd(acc, flip_sign(w(0, width), width), q(0, width), width)


def _vpmaddwd(acc: Expr, w: Load, q: Load) -> Expr:
    """Widen first: vpmaddubsw would saturate, because 2 * 127 * 255 is beyond int16."""
    # 16 bytes become 16 int16. vpmaddwd adds neighbouring products to 8 int32.
    wide = (T.Cast("int16x16", v(0, 16)) for v in (w, q))
    return acc + intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", *wide)


def _smull(acc: Expr, w: Load, q: Load) -> Expr:
    """Add two products in int16: 2 * 127 * 128 < 2**15."""
    # Eight products per half. saddlp adds neighbours and widens the sums to int32.
    low, high = (intrinsic("int16x8", "llvm.aarch64.neon.smull.v8i16", w(o, 8), q(o, 8)) for o in (0, 8))
    return acc + intrinsic("int32x4", "llvm.aarch64.neon.saddlp.v4i32.v8i16", low + high)


def _sdot(acc: Expr, w: Load, q: Load) -> Expr:
    # Both factors are signed, so no zero-point correction is needed.
    return intrinsic("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, w(0, 16), q(0, 16))


def _portable(acc: Expr, w: Load, q: Load) -> Expr:
    """Add two products in int16, as for smull."""
    low, high = (T.Cast("int16x8", w(o, 8)) * T.Cast("int16x8", q(o, 8)) for o in (0, 8))
    return acc + T.Cast("int32x8", low + high)


INT8_DOTS: dict[Int8, Int8Dot] = {
    "vnni512": Int8Dot(64, 16, True, 12, 1, _vpdpbusd(64)),
    "vnni256": Int8Dot(32, 8, True, 8, 1, _vpdpbusd(32)),
    "madd": Int8Dot(16, 8, False, 8, 8, _vpmaddwd),
    "sdot": Int8Dot(16, 4, False, 12, 8, _sdot),
    "smull": Int8Dot(16, 4, False, 8, 8, _smull),
    "portable": Int8Dot(16, 8, False, 4, 8, _portable),
}


# int8 GEMV and GEMM with exact int32 accumulation, bit for bit as fastcar_compile.ir.ops.linear defines it.


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


@dataclass(frozen=True)
class _Operands:
    """The arguments of `linear_w8a8`, and the temporaries correction and active, int32 [m]."""

    q: Any
    s: Any
    w: Any
    ws: Any
    y: Any
    correction: Any
    active: Any


def tile_shape(m: int, n: int, dot: Int8Dot) -> tuple[int, int]:
    """Return weight rows and activation rows of a tile, so that the fewest tiles cover m."""
    if m == 1 or (m == 2 and dot.streams == 1):
        return min(dot.streams, n), m
    widest = (3, 4) if dot.accumulators >= 12 else (2,)
    # The width that covers m with the fewest tiles. A remainder takes tiles of one row, and a tie the wider tile.
    columns = min(m, *sorted(widest, key=lambda c: (m // c + m % c, -c))[:1])
    return min(dot.accumulators // columns, n), columns


@kernel
def linear_w8a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = float(sum_k q[m, k] * w[n, k]) * (s[m] * ws[n]), with the sum exact in int32.

    q int8 [m, k], s float32 [m], w int8 [n, k], ws float32 [n], y float32 [m, n]. Inactive rows are not multiplied.
    Parallel over tiles of weight rows. Such a tile stays in the first-level cache while all rows of q pass, so weights
    are read from memory once. The bias is added by another kernel: LLVM would contract the last product and the
    addition into one rounding.
    """
    dot = INT8_DOTS[isa.int8]
    # A single row is multiplied without a search for zeros.
    scanned = k if m > 1 else 0
    tiling = Tiling(n, *tile_shape(m, n, dot), T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial)
    multiply, correct = _multiply(n, k, dot, m), _correct(k, dot)

    @script.prim_func(private=True, s_tir=True)
    def linear_i8(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, k), "int8"),
        ws: T.Buffer((n,), "float32"),
        y: T.Buffer((m, n), "float32"),
    ):
        with T.sblock("root"):
            access([q, s, w, ws], [y])
            correction = T.alloc_buffer((m,), "int32")
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")

            count[0] = 0
            for i in range(m):
                with T.sblock("row"):
                    access([q, s, count], [correction, active, count, y])
                    correct(q, i, correction)
                    bits = T.alloc_buffer((SCAN_LANES,), "uint32")
                    or_int8(q, i, scanned, bits)
                    if scanned > 0 and is_zero(bits):
                        for j in range(n):
                            # The rounding steps of the formula: a scale that is no number stays visible.
                            y[i, j] = T.float32(0) * (s[i] * ws[j])
                    else:
                        append_active(ActiveRows(active, count), i)
            for_tiles(tiling, multiply, _Operands(q, s, w, ws, y, correction, active), count[0])

    return linear_i8


@dataclass(frozen=True)
class Few:
    """How a few active rows of many are multiplied.

    Args:
        most: rows. multiply: the macro (operands, count).
    """

    most: int
    multiply: Any

    @classmethod
    def of(cls, n: int, k: int, isa: InstructionSet) -> Few:
        """Return it for x int8 [., k] and w int8 [n, k]."""
        dot = INT8_DOTS[isa.int8]
        tiling = Tiling(n, *tile_shape(SMALL_BATCH, n, dot), T.parallel if n * k >= PARALLEL_WEIGHTS else T.serial)
        tile, correct = _multiply(n, k, dot, SMALL_BATCH), _correct(k, dot)

        @inlined
        def multiply(o, count):
            for i in range(count):
                correct(o.q, o.active[i], o.correction)
            for_tiles(tiling, tile, o, count)

        return cls(SMALL_BATCH, multiply)

    @staticmethod
    def operands(*buffers: Any) -> _Operands:
        """Return the operands: q, s, w, ws, y and the temporaries correction and active, int32 [m]."""
        return _Operands(*buffers)


def _zero_weights(_offset: int, size: int) -> Expr:
    return T.Broadcast(T.int8(0), size)


def _correct(k: int, dot: Int8Dot) -> Any:
    """Return the macro (q, i, correction): what unsigned weights add to the sums of row i, or 0."""

    @inlined
    def correct(q, i, correction):
        if dot.unsigned:
            acc = T.alloc_buffer((dot.lanes,), "int32")
            acc[vector(0, dot.lanes)] = T.Broadcast(0, dot.lanes)
            # Whole steps only: the remainder of a row is multiplied with signed weights and needs no correction.
            for c in range(k // dot.width):
                acc[vector(0, dot.lanes)] = dot.step(
                    acc[vector(0, dot.lanes)], _zero_weights, load_from(q, [i], c * dot.width)
                )
            correction[i] = reduce_add(acc[vector(0, dot.lanes)], dot.lanes)
        else:
            correction[i] = 0

    return correct


def _multiply(n: int, k: int, dot: Int8Dot, rows: int) -> TileMacro:
    lanes, width = dot.lanes, dot.width
    steps, tail = divmod(k, width)
    rows_ahead, bytes_ahead = prefetch_distance(tile_shape(rows, n, dot)[0], k)
    streamed = rows <= SMALL_BATCH

    @inlined
    def add_products(o, tile, acc):
        # c: steps of `width` along k. v: unrolled, one instruction per output; acc is in registers.
        for v in T.unroll(tile.outputs):
            acc[vector(v, lanes)] = T.Broadcast(0, lanes)
        for c in range(steps):
            # With many rows of x the first tile brings the weights to the cache: no prefetch is needed.
            if streamed:
                for v in T.unroll(tile.rows):
                    T.evaluate(prefetch(o.w[tile.j + rows_ahead + v, c * width + bytes_ahead]))
            for v in T.unroll(tile.outputs):
                acc[vector(v, lanes)] = dot.step(
                    acc[vector(v, lanes)],
                    load_from(o.w, [tile.weight_row(v)], c * width),
                    load_from(o.q, [o.active[tile.active_row(v)]], c * width),
                )

    def four_vectors(acc: Any, tile: Tile, p: Expr) -> list[Expr]:
        # The last vector stands for those that do not exist.
        return [acc[vector(T.min(p * 4 + v, tile.outputs - 1), lanes)] for v in range(4)]

    @inlined
    def add_tail(o, tile, sums):
        for t in range(tail):
            for v in T.unroll(tile.outputs):
                sums[v] += T.Cast("int32", o.q[o.active[tile.active_row(v)], steps * width + t]) * T.Cast(
                    "int32", o.w[tile.weight_row(v), steps * width + t]
                )

    @inlined
    def multiply(o, tile):
        with T.sblock("tile"):
            access([o.q, o.s, o.w, o.ws, o.correction, o.active], [o.y])
            acc = T.alloc_buffer((tile.outputs * lanes,), "int32")
            pairs = T.alloc_buffer((2 * lanes,), "int32")
            fours = T.alloc_buffer((lanes,), "int32")
            sums = T.alloc_buffer((-(-tile.outputs // 4) * 4,), "int32")
            add_products(o, tile, acc)
            # p: four outputs, whose sums across lanes are one vector.
            for p in T.unroll(-(-tile.outputs // 4)):
                interleave_fours(four_vectors(acc, tile, p), lanes, pairs, fours)
                sums[ramp(p * 4, 4)] = fold_fours(load_from(fours, [], 0), lanes)
            add_tail(o, tile, sums)
            for v in T.unroll(tile.outputs):
                # The scales are multiplied first: the order of the definition decides the rounding.
                o.y[o.active[tile.active_row(v)], tile.weight_row(v)] = T.Cast(
                    "float32", sums[v] - o.correction[o.active[tile.active_row(v)]]
                ) * (o.s[o.active[tile.active_row(v)]] * o.ws[tile.weight_row(v)])

    return multiply
