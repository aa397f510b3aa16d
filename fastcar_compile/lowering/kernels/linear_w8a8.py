"""int8 GEMV and GEMM with exact int32 accumulation, bit for bit as fastcar_compile.ops.quant defines it."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels.int8_dot import INT8_DOTS
from fastcar_compile.lowering.kernels.linear import PARALLEL_ELEMENTS
from fastcar_compile.lowering.kernels.vectors import lane_total, row, totals4


def tile_of(m: int, n: int, accumulators: int) -> tuple[int, int]:
    """Weight rows and activation rows that are multiplied together.

    One activation row takes eight weight rows, as many streams of memory; more share the weights in registers.
    """
    deepest = 3 if accumulators >= 12 else 2
    columns = -(-m // -(-m // deepest))
    rows = 8 if columns == 1 and accumulators >= 8 else 4
    return min(rows, n), columns


def linear_w8a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """y[m, n] = float(sum_k q[m, k] * w[n, k]) * (s[m] * ws[n]); the sum is exact in int32.

    q int8 [m, k], s float32 [m], w int8 [n, k], ws float32 [n], y float32 [m, n]. Parallel over blocks of n; a block
    stays in the first cache while all rows of q pass, so weights are read from memory once.
    The bias is added by another kernel: LLVM would contract the last product and the addition into one rounding.
    """
    dot = INT8_DOTS[isa.int8]
    lanes, width, step = dot.lanes, dot.width, dot.step
    whole, tail = k // width, k % width
    rows, columns = tile_of(m, n, dot.tile)
    loop = T.parallel if n * k * m >= 2 * PARALLEL_ELEMENTS else T.serial

    def nothing(offset: int, size: int) -> object:
        return T.Broadcast(T.int8(0), size)

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

            @T.inline
            def tile(j, i, rs, cs):
                with T.sblock("tile"):
                    T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0:k], ws[0:n], excess[0:m])
                    T.writes(y[0:m, 0:n])
                    acc = T.alloc_buffer((rs * cs * lanes,), "int32")
                    sums = T.alloc_buffer((-(-rs * cs // 4) * 4,), "int32")
                    for v in T.unroll(rs * cs):
                        acc[T.Ramp(v * lanes, 1, lanes)] = T.Broadcast(0, lanes)
                    for c in range(whole):
                        for r in T.unroll(rs):
                            for a in T.unroll(cs):
                                acc[T.Ramp((r * cs + a) * lanes, 1, lanes)] = step(
                                    acc[T.Ramp((r * cs + a) * lanes, 1, lanes)],
                                    row(w, [j + r], c * width),
                                    row(q, [i + a], c * width),
                                )
                    for p in T.unroll(-(-rs * cs // 4)):
                        totals4(sums, p * 4, acc, [T.min(p * 4 + v, rs * cs - 1) for v in range(4)], lanes)
                    for t in range(tail):
                        for v in T.unroll(rs * cs):
                            sums[v] += T.Cast("int32", q[i + v % cs, whole * width + t]) * T.Cast(
                                "int32", w[j + v // cs, whole * width + t]
                            )
                    for v in T.unroll(rs * cs):
                        y[i + v % cs, j + v // cs] = T.Cast("float32", sums[v] - excess[i + v % cs]) * (
                            s[i + v % cs] * ws[j + v // cs]
                        )

            @T.inline
            def all_rows(j, rs):
                for io in range(m // columns):
                    tile(j, io * columns, rs, columns)
                if m % columns > 0:
                    tile(j, m // columns * columns, rs, m % columns)

            for i in range(m):
                with T.sblock("excess"):
                    T.reads(q[0:m, 0:k])
                    T.writes(excess[i])
                    if dot.unsigned:
                        acc = T.alloc_buffer((lanes,), "int32")
                        acc[T.Ramp(0, 1, lanes)] = T.Broadcast(0, lanes)
                        for c in range(whole):
                            acc[T.Ramp(0, 1, lanes)] = step(acc[T.Ramp(0, 1, lanes)], nothing, row(q, [i], c * width))
                        excess[i] = lane_total(acc[T.Ramp(0, 1, lanes)], lanes)
                    else:
                        excess[i] = 0
            for jo in loop(n // rows):
                all_rows(jo * rows, rows)
            if n % rows > 0:
                all_rows(n // rows * rows, n % rows)

    return linear_i8
