"""GEMV and small-batch GEMM with float32 or bfloat16 weights: dot products along the reduction."""

from __future__ import annotations

from functools import partial

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels.linear import active_rows
from fastcar_compile.codegen.tvm.kernels.linear.active_rows import in_tiles, none_seen, note_float32
from fastcar_compile.codegen.tvm.kernels.linear.weight_type import WeightType, widen_weight
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, ahead, prefetch

ROWS = 4
"""Weight rows read together: enough independent sums to hide the multiply-add latency, and four memory streams."""

SMALL_BATCH = 8
"""Most rows of x that this kernel takes; its work per weight is still hidden behind the memory."""

PARALLEL_WEIGHTS = 1 << 18
"""Weights from which a second thread pays for launching and awaiting a parallel region."""


@kernel
def float_gemv(m: int, n: int, k: int, dtype: WeightType = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w float32 or bfloat16, m at most 8.

    All rows of x meet a weight while it is in a register, so that weights are streamed once; where some of them are
    zero, the others meet it one after the other while it is in the first cache. The order of a row's sum does not
    depend on the other rows. Parallel over weight rows when it pays.
    """
    lanes = 2 * isa.float_lanes if m == 1 else max(isa.float_lanes, 8)
    whole, tail = k // lanes, k % lanes
    rows = min(n, ROWS if m <= 2 else 2 if m < SMALL_BATCH else 1)
    size = 4 if dtype == "float32" else 2
    (later, further), lines = ahead(rows, k * size), -(-lanes * size // LINE)
    scanned = k if m > 1 else 0
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial

    @inlined
    def tile(x, w, y, live, j, first, rs, cs):
        with T.sblock("tile"):
            T.reads(x[0:m, 0:k], w[0:n, 0:k], live[0:m])
            T.writes(y[0:m, 0:n])
            acc = T.alloc_buffer((rs * cs * lanes,), "float32")
            for r in T.unroll(rs * cs):
                for v in T.vectorized(lanes):
                    acc[r * lanes + v] = T.float32(0)
            for c in range(whole):
                for r in T.unroll(rs):
                    for u in T.unroll(lines):
                        T.evaluate(prefetch(w[j + later + r, c * lanes + u * (LINE // size) + further // size]))
                for r in T.unroll(rs):
                    for i in T.unroll(cs):
                        for v in T.vectorized(lanes):
                            acc[(r * cs + i) * lanes + v] += x[live[first + i], c * lanes + v] * widen_weight(
                                w[j + r, c * lanes + v], dtype
                            )
            for r in T.unroll(rs):
                for i in T.unroll(cs):
                    if lanes >= 32:
                        for v in T.vectorized(16):
                            acc[(r * cs + i) * lanes + v] += acc[(r * cs + i) * lanes + v + 16]
                    if lanes >= 16:
                        for v in T.vectorized(8):
                            acc[(r * cs + i) * lanes + v] += acc[(r * cs + i) * lanes + v + 8]
                    for v in T.vectorized(4):
                        acc[(r * cs + i) * lanes + v] += acc[(r * cs + i) * lanes + v + 4]
                    for v in T.unroll(3):
                        acc[(r * cs + i) * lanes] += acc[(r * cs + i) * lanes + v + 1]
                    for t in range(tail):
                        acc[(r * cs + i) * lanes] += x[live[first + i], whole * lanes + t] * widen_weight(
                            w[j + r, whole * lanes + t], dtype
                        )
                    y[live[first + i], j + r] = acc[(r * cs + i) * lanes]

    @T.prim_func(private=True, s_tir=True)
    def linear_float(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), dtype), y: T.Buffer((m, n), "float32")):
        T.func_attr({"tir.noalias": True})
        with T.sblock("root"):
            T.reads(x[0:m, 0:k], w[0:n, 0:k])
            T.writes(y[0:m, 0:n])
            live = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")

            count[0] = 0
            for i in range(m):
                with T.sblock("row"):
                    T.reads(x[0:m, 0:k], count[0])
                    T.writes(live[0:m], count[0], y[0:m, 0:n])
                    seen = T.alloc_buffer((active_rows.LANES,), "uint32")
                    note_float32(x, i, scanned, seen)
                    if scanned > 0 and none_seen(seen):
                        for j in range(n):
                            y[i, j] = T.float32(0)
                    else:
                        live[count[0]] = i
                        count[0] += 1
            in_tiles(loop, partial(tile, x, w, y, live), n, rows, count[0], m)

    return linear_float
