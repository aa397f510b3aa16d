"""int4 GEMV and GEMM in groups of 128, exact int32 group sums, bit for bit as fastcar_compile.ops.quant defines it."""

from __future__ import annotations

from functools import partial

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels.int4_dot import HALF, INT4_DOTS
from fastcar_compile.lowering.kernels.linear import PARALLEL_ELEMENTS, SMALL_BATCH
from fastcar_compile.lowering.kernels.live_rows import LANES, in_tiles, none_seen, note_int8
from fastcar_compile.lowering.kernels.script import inlined, kernel
from fastcar_compile.lowering.kernels.vectors import (
    Expr,
    fence,
    folded,
    gather,
    interleaved,
    lane_total,
    prefetch,
    prefetch_ahead,
    row,
)
from fastcar_compile.ops.quant import GROUP

_FLOAT_EXPONENT = 112 << 23
"""Difference of the exponent biases of float32 and float16, in place."""


def tile_of(m: int, n: int) -> tuple[int, int]:
    """Weight rows and activation rows that are multiplied together: eight sums, added up four at a time."""
    columns = 1 if m == 1 else 2 if m < 4 else 4
    return min(8 // columns, n), columns


def float_scales(scales: list[Expr]) -> Expr:
    """float32 vector of float16 scalars, all of them normal: their bits, moved."""
    bits = gather([T.Cast("uint32", T.reinterpret("uint16", scale)) for scale in scales])
    count = len(scales)
    moved = T.shift_left(bits, T.Broadcast(T.uint32(13), count)) + T.Broadcast(T.uint32(_FLOAT_EXPONENT), count)
    return T.reinterpret(f"float32x{count}", moved)


@kernel
def linear_w4a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Group by group: y = float(sum q * w) * ws, added in ascending order; then times the row's scale.

    q int8 [m, k], s float32 [m], w uint8 [n, 64 * G] (`ops.quant.pack_int4`), ws float16 [n, G], y float32 [m, n].
    Rows of q that are zero are not multiplied. Four outputs at a time, in the lanes of one vector. The fence keeps
    LLVM from contracting a product and the addition after it into one rounding. As for w8a8, another kernel adds the
    bias.
    """
    dot = INT4_DOTS[isa.int8]
    lanes, group = dot.lanes, dot.group
    groups = -(-k // GROUP)
    padded, packed = groups * GROUP, groups * HALF
    rows, columns = tile_of(m, n)
    ahead, streamed = prefetch_ahead(rows, packed), m <= SMALL_BATCH
    scanned = k if m > 1 else 0
    loop = T.parallel if n * k * m >= 2 * PARALLEL_ELEMENTS else T.serial

    def nothing(offset: int, size: int) -> Expr:
        return T.Broadcast(T.uint8(0), size)

    @inlined
    def tile(x, s, w, ws, y, excess, live, j, i, rs, cs):
        with T.sblock("tile"):
            T.reads(x[0:m, 0:padded], s[0:m], w[0:n, 0:packed], ws[0:n, 0:groups], excess[0:m, 0:groups], live[0:m])
            T.writes(y[0:m, 0:n])
            parts = T.alloc_buffer((4 * lanes,), "int32")
            pairs = T.alloc_buffer((2 * lanes,), "int32")
            fours = T.alloc_buffer((lanes,), "int32")
            total = T.alloc_buffer((-(-rs * cs // 4) * 4,), "float32")
            for p in T.unroll(-(-rs * cs // 4)):
                total[T.Ramp(p * 4, 1, 4)] = T.Broadcast(T.float32(0), 4)
            for g in range(groups):
                if streamed:
                    for v in T.unroll(rs):
                        T.evaluate(prefetch(w[j + ahead + v, g * HALF]))
                for p in T.unroll(-(-rs * cs // 4)):
                    for v in T.unroll(4):
                        parts[T.Ramp(v * lanes, 1, lanes)] = group(
                            row(w, [j + T.min(p * 4 + v, rs * cs - 1) // cs], g * HALF),
                            row(x, [i + T.min(p * 4 + v, rs * cs - 1) % cs], g * GROUP),
                        )
                    for h in T.unroll(2):
                        pairs[T.Ramp(h * lanes, 1, lanes)] = interleaved(
                            parts[T.Ramp(2 * h * lanes, 1, lanes)],
                            parts[T.Ramp((2 * h + 1) * lanes, 1, lanes)],
                            lanes,
                            1,
                        )
                    fours[T.Ramp(0, 1, lanes)] = interleaved(
                        pairs[T.Ramp(0, 1, lanes)], pairs[T.Ramp(lanes, 1, lanes)], lanes, 2
                    )
                    total[T.Ramp(p * 4, 1, 4)] = total[T.Ramp(p * 4, 1, 4)] + fence(
                        "float32x4",
                        T.Cast(
                            "float32x4",
                            folded(row(fours, [], 0), lanes)
                            - gather([excess[i + T.min(p * 4 + v, rs * cs - 1) % cs, g] for v in range(4)]),
                        )
                        * float_scales([ws[j + T.min(p * 4 + v, rs * cs - 1) // cs, g] for v in range(4)]),
                    )
            for v in T.unroll(rs * cs):
                y[live[i + v % cs], j + v // cs] = total[v] * s[live[i + v % cs]]

    @T.prim_func(private=True, s_tir=True)
    def linear_i4(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, packed), "uint8"),
        ws: T.Buffer((n, groups), "float16"),
        y: T.Buffer((m, n), "float32"),
    ):
        T.func_attr({"tir.noalias": True})
        with T.sblock("root"):
            T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0:packed], ws[0:n, 0:groups])
            T.writes(y[0:m, 0:n])
            x = T.alloc_buffer((m, padded), "int8")
            excess = T.alloc_buffer((m, groups), "int32")

            live = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")

            count[0] = 0
            for i in range(m):
                with T.sblock("row"):
                    T.reads(q[0:m, 0:k], s[0:m], count[0])
                    T.writes(x[0:m, 0:padded], excess[0:m, 0:groups], live[0:m], count[0], y[0:m, 0:n])
                    seen = T.alloc_buffer((LANES,), "uint32")
                    note_int8(q, i, scanned, seen)
                    if scanned > 0 and none_seen(seen):
                        for j in range(n):
                            y[i, j] = T.float32(0) * s[i]
                    else:
                        for t in range(k):
                            x[count[0], t] = q[i, t]
                        for t in range(padded - k):
                            x[count[0], k + t] = T.int8(0)
                        for g in range(groups):
                            if dot.unsigned:
                                excess[count[0], g] = lane_total(group(nothing, row(x, [count[0]], g * GROUP)), lanes)
                            else:
                                excess[count[0], g] = 0
                        live[count[0]] = i
                        count[0] += 1
            in_tiles(loop, partial(tile, x, s, w, ws, y, excess, live), n, rows, count[0], columns)

    return linear_i4
