"""int8 GEMV and GEMM with exact int32 accumulation, bit for bit as fastcar_compile.ops.quant defines it."""

from __future__ import annotations

from functools import partial

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels.linear.active_rows import LANES, in_tiles, none_seen, note_int8
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS, SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.linear.int8_dot import INT8_DOTS, Int8Dot
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import (
    Expr,
    ahead,
    folded,
    interleaved,
    lane_total,
    prefetch,
    row,
)


def tile_of(m: int, n: int, dot: Int8Dot) -> tuple[int, int]:
    """Weight rows and activation rows that are multiplied together; the fewest tiles that cover m."""
    if m == 1 or (m == 2 and dot.streams == 1):
        return min(dot.streams, n), m
    widest = (3, 4) if dot.tile >= 12 else (2,)
    columns = min(m, *sorted(widest, key=lambda c: (m // c + m % c, -c))[:1])
    return min(dot.tile // columns, n), columns


@kernel
def linear_w8a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """y[m, n] = float(sum_k q[m, k] * w[n, k]) * (s[m] * ws[n]); the sum is exact in int32.

    q int8 [m, k], s float32 [m], w int8 [n, k], ws float32 [n], y float32 [m, n]. Rows of q that are zero are not
    multiplied. Parallel over blocks of n; a block stays in the first cache while all rows of q pass, so weights are
    read from memory once. The bias is added by another kernel: LLVM would contract the last product and the addition
    into one rounding.
    """
    dot = INT8_DOTS[isa.int8]
    lanes, width, step = dot.lanes, dot.width, dot.step
    whole, tail = k // width, k % width
    rows, columns = tile_of(m, n, dot)
    later, further = ahead(rows, k)
    streamed = m <= SMALL_BATCH
    scanned = k if m > 1 else 0
    loop = T.parallel if n * k * m >= 2 * PARALLEL_WEIGHTS else T.serial

    def nothing(offset: int, size: int) -> Expr:
        return T.Broadcast(T.int8(0), size)

    @inlined
    def tile(q, s, w, ws, y, excess, live, j, i, rs, cs):
        with T.sblock("tile"):
            T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0:k], ws[0:n], excess[0:m], live[0:m])
            T.writes(y[0:m, 0:n])
            acc = T.alloc_buffer((rs * cs * lanes,), "int32")
            pairs = T.alloc_buffer((2 * lanes,), "int32")
            fours = T.alloc_buffer((lanes,), "int32")
            sums = T.alloc_buffer((-(-rs * cs // 4) * 4,), "int32")
            for v in T.unroll(rs * cs):
                acc[T.Ramp(v * lanes, 1, lanes)] = T.Broadcast(0, lanes)
            for c in range(whole):
                if streamed:
                    for v in T.unroll(rs):
                        T.evaluate(prefetch(w[j + later + v, c * width + further]))
                for v in T.unroll(rs * cs):
                    acc[T.Ramp(v * lanes, 1, lanes)] = step(
                        acc[T.Ramp(v * lanes, 1, lanes)],
                        row(w, [j + v // cs], c * width),
                        row(q, [live[i + v % cs]], c * width),
                    )
            for p in T.unroll(-(-rs * cs // 4)):
                for h in T.unroll(2):
                    pairs[T.Ramp(h * lanes, 1, lanes)] = interleaved(
                        acc[T.Ramp(T.min(p * 4 + 2 * h, rs * cs - 1) * lanes, 1, lanes)],
                        acc[T.Ramp(T.min(p * 4 + 2 * h + 1, rs * cs - 1) * lanes, 1, lanes)],
                        lanes,
                        1,
                    )
                fours[T.Ramp(0, 1, lanes)] = interleaved(
                    pairs[T.Ramp(0, 1, lanes)], pairs[T.Ramp(lanes, 1, lanes)], lanes, 2
                )
                sums[T.Ramp(p * 4, 1, 4)] = folded(row(fours, [], 0), lanes)
            for t in range(tail):
                for v in T.unroll(rs * cs):
                    sums[v] += T.Cast("int32", q[live[i + v % cs], whole * width + t]) * T.Cast(
                        "int32", w[j + v // cs, whole * width + t]
                    )
            for v in T.unroll(rs * cs):
                y[live[i + v % cs], j + v // cs] = T.Cast("float32", sums[v] - excess[live[i + v % cs]]) * (
                    s[live[i + v % cs]] * ws[j + v // cs]
                )

    @T.prim_func(private=True, s_tir=True)
    def linear_i8(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, k), "int8"),
        ws: T.Buffer((n,), "float32"),
        y: T.Buffer((m, n), "float32"),
    ):
        T.func_attr({"tir.noalias": True})
        with T.sblock("root"):
            T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0:k], ws[0:n])
            T.writes(y[0:m, 0:n])
            excess = T.alloc_buffer((m,), "int32")
            live = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")

            count[0] = 0
            for i in range(m):
                with T.sblock("row"):
                    T.reads(q[0:m, 0:k], s[0:m], count[0])
                    T.writes(excess[0:m], live[0:m], count[0], y[0:m, 0:n])
                    if dot.unsigned:
                        acc = T.alloc_buffer((lanes,), "int32")
                        acc[T.Ramp(0, 1, lanes)] = T.Broadcast(0, lanes)
                        for c in range(whole):
                            acc[T.Ramp(0, 1, lanes)] = step(acc[T.Ramp(0, 1, lanes)], nothing, row(q, [i], c * width))
                        excess[i] = lane_total(acc[T.Ramp(0, 1, lanes)], lanes)
                    else:
                        excess[i] = 0
                    seen = T.alloc_buffer((LANES,), "uint32")
                    note_int8(q, i, scanned, seen)
                    if scanned > 0 and none_seen(seen):
                        for j in range(n):
                            y[i, j] = T.float32(0) * (s[i] * ws[j])
                    else:
                        live[count[0]] = i
                        count[0] += 1
            in_tiles(loop, partial(tile, q, s, w, ws, y, excess, live), n, rows, count[0], columns)

    return linear_i8
