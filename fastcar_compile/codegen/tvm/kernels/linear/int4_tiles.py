"""Tiles of the int4 kernel: exact int32 group sums, times their scales, added in ascending order of the groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.linear.int4_dot import HALF, INT4_DOTS, Int4Dot
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import (
    Expr,
    ahead,
    fence,
    folded,
    gather,
    interleaved,
    prefetch,
    row,
)
from fastcar_compile.ops.quant import GROUP

_FLOAT_EXPONENT = 112 << 23
"""Difference of the exponent biases of float32 and float16, in place."""

PAGE = 4096
"""Bytes of the longest row that is one stream."""

Tile = Callable[..., None]
"""(x, s, w, ws, y, excess, live, first weight row, first row of x, weight rows, rows of x): the kernel's arguments and
temporaries, then what to multiply."""


def tile_of(m: int, n: int, k: int, dot: Int4Dot) -> tuple[int, int]:
    """Weight rows and rows of x that are multiplied together: eight sums, or one where weights are a single stream."""
    if _one_stream(m, k, dot):
        return 1, 1
    columns = 1 if m == 1 else 2 if m < 4 else 4
    return min(8 // columns, n), columns


def tile_for(m: int, n: int, k: int, isa: InstructionSet) -> Tile:
    """For m rows of x of k, n weight rows; what it multiplies is as `tile_of` says, or less."""
    return (_groups_in_lanes if _one_stream(m, k, INT4_DOTS[isa.int8]) else _rows_in_lanes)(m, n, k, isa)


def _one_stream(m: int, k: int, dot: Int4Dot) -> bool:
    """Measured: short rows are faster one after the other, longer ones, or those with a rest, side by side."""
    groups = -(-k // GROUP)
    return m == 1 and dot.streams == 1 and groups % 4 == 0 and groups * HALF <= PAGE


def _float_scales(bits: Expr) -> Expr:
    """float32x4 of the bits of four float16, all of them normal, as uint32x4: the bits, moved."""
    moved = T.shift_left(bits, T.Broadcast(T.uint32(13), 4)) + T.Broadcast(T.uint32(_FLOAT_EXPONENT), 4)
    return T.reinterpret("float32x4", moved)


def _scale_bits(scales: Expr, lanes: str = "") -> Expr:
    return T.Cast(f"uint32{lanes}", T.reinterpret(f"uint16{lanes}", scales))


def _four_products(isa: InstructionSet) -> Callable[..., None]:
    """A macro (w, x, places, excess, scales, products): products of four groups in the lanes of a vector.

    `places` are a weight row, a row of x and a group of each; `excess` int32x4 is subtracted from the sums, which are
    then multiplied by the float16 with the bits `scales` uint32x4. The fence keeps LLVM from contracting that and an
    addition into one rounding.
    """
    dot = INT4_DOTS[isa.int8]
    lanes = dot.lanes

    def sums(w: Any, x: Any, place: tuple[Expr, Expr, Expr]) -> Expr:
        j, i, g = place
        return dot.group(row(w, [j], g * HALF), row(x, [i], g * GROUP))

    @inlined
    def four(w, x, places, excess, scales, products):
        parts = T.alloc_buffer((4 * lanes,), "int32")
        pairs = T.alloc_buffer((2 * lanes,), "int32")
        fours = T.alloc_buffer((lanes,), "int32")
        parts[T.Ramp(0, 1, lanes)] = sums(w, x, places[0])
        parts[T.Ramp(lanes, 1, lanes)] = sums(w, x, places[1])
        parts[T.Ramp(2 * lanes, 1, lanes)] = sums(w, x, places[2])
        parts[T.Ramp(3 * lanes, 1, lanes)] = sums(w, x, places[3])
        for h in T.unroll(2):
            pairs[T.Ramp(h * lanes, 1, lanes)] = interleaved(
                parts[T.Ramp(2 * h * lanes, 1, lanes)], parts[T.Ramp((2 * h + 1) * lanes, 1, lanes)], lanes, 1
            )
        fours[T.Ramp(0, 1, lanes)] = interleaved(pairs[T.Ramp(0, 1, lanes)], pairs[T.Ramp(lanes, 1, lanes)], lanes, 2)
        products[T.Ramp(0, 1, 4)] = fence(
            "float32x4", T.Cast("float32x4", folded(row(fours, [], 0), lanes) - excess) * _float_scales(scales)
        )

    return four


def _groups_in_lanes(m: int, n: int, k: int, isa: InstructionSet) -> Tile:
    """One weight row after the other, four groups of it at a time."""
    groups = -(-k // GROUP)
    padded, packed = groups * GROUP, groups * HALF
    _, further = ahead(1, packed)
    four = _four_products(isa)

    def places(j: Expr, i: Expr, first: Expr) -> Sequence[tuple[Expr, Expr, Expr]]:
        return [(j, i, first + v) for v in range(4)]

    @inlined
    def tile(x, s, w, ws, y, excess, live, j, i, _rs, _cs):
        with T.sblock("tile"):
            T.reads(x[0:m, 0:padded], s[0:m], w[0:n, 0:packed], ws[0:n, 0:groups], excess[0:m, 0:groups], live[0:m])
            T.writes(y[0:m, 0:n])
            products = T.alloc_buffer((4,), "float32")
            total = T.alloc_buffer((1,), "float32")
            total[0] = T.float32(0)
            for g in range(groups // 4):
                for v in T.unroll(4):
                    T.evaluate(prefetch(w[j, (g * 4 + v) * HALF + further]))
                four(
                    w,
                    x,
                    places(j, i, g * 4),
                    excess[i, T.Ramp(g * 4, 1, 4)],
                    _scale_bits(ws[j, T.Ramp(g * 4, 1, 4)], "x4"),
                    products,
                )
                for v in T.unroll(4):
                    total[0] += products[v]
            y[live[i], j] = total[0] * s[live[i]]

    return tile


def _rows_in_lanes(m: int, n: int, k: int, isa: InstructionSet) -> Tile:
    """Weight rows side by side, so that a load of activations serves several; four outputs at a time."""
    groups = -(-k // GROUP)
    padded, packed = groups * GROUP, groups * HALF
    later, _ = ahead(tile_of(m, n, k, INT4_DOTS[isa.int8])[0], packed)
    streamed = m <= SMALL_BATCH
    four = _four_products(isa)

    def places(j: Expr, i: Expr, g: Expr, first: Expr, rs: int, cs: int) -> Sequence[tuple[Expr, Expr, Expr]]:
        at = [T.min(first + v, rs * cs - 1) for v in range(4)]
        return [(j + v // cs, i + v % cs, g) for v in at]

    @inlined
    def tile(x, s, w, ws, y, excess, live, j, i, rs, cs):
        with T.sblock("tile"):
            T.reads(x[0:m, 0:padded], s[0:m], w[0:n, 0:packed], ws[0:n, 0:groups], excess[0:m, 0:groups], live[0:m])
            T.writes(y[0:m, 0:n])
            products = T.alloc_buffer((4,), "float32")
            total = T.alloc_buffer((-(-rs * cs // 4) * 4,), "float32")
            for p in T.unroll(-(-rs * cs // 4)):
                total[T.Ramp(p * 4, 1, 4)] = T.Broadcast(T.float32(0), 4)
            for g in range(groups):
                if streamed:
                    for v in T.unroll(rs):
                        T.evaluate(prefetch(w[j + later + v, g * HALF]))
                for p in T.unroll(-(-rs * cs // 4)):
                    four(
                        w,
                        x,
                        places(j, i, g, p * 4, rs, cs),
                        gather([excess[at, g] for _, at, _ in places(j, i, g, p * 4, rs, cs)]),
                        gather([_scale_bits(ws[at, g]) for at, _, _ in places(j, i, g, p * 4, rs, cs)]),
                        products,
                    )
                    total[T.Ramp(p * 4, 1, 4)] = total[T.Ramp(p * 4, 1, 4)] + products[T.Ramp(0, 1, 4)]
            for v in T.unroll(rs * cs):
                y[live[i + v % cs], j + v // cs] = total[v] * s[live[i + v % cs]]

    return tile
