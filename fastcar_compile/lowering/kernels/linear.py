"""GEMV and small-batch GEMM with float32 or bfloat16 weights: dot products along the reduction."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels.vectors import LINE, prefetch, prefetch_ahead
from fastcar_compile.lowering.kernels.weights import WeightType, widened

ROWS = 4
"""Weight rows read together: enough independent sums to hide the multiply-add latency, and four memory streams."""

SMALL_BATCH = 8
"""Most rows of x that this kernel takes; its work per weight is still hidden behind the memory."""

PARALLEL_ELEMENTS = 1 << 18
"""Weights from which a second thread pays for the 5-10 us of a parallel region."""


def block_rows(n: int) -> int:
    """Output rows that one iteration of the (parallel) outer loop computes; a multiple of ROWS where n allows."""
    return next(r for r in (32, 16, 8, 4, 2, 1) if n % r == 0)


def linear(m: int, n: int, k: int, dtype: WeightType = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w float32 or bfloat16, m at most 8.

    All rows of x meet a weight while it is in a register, so that weights are streamed once. Parallel over blocks of n
    when it pays.
    """
    lanes = 2 * isa.float_lanes if m == 1 else max(isa.float_lanes, 8)
    whole, tail = k // lanes, k % lanes
    block = block_rows(n)
    rows = min(block, 4 if m <= 2 else 2 if m < SMALL_BATCH else 1)
    size = 4 if dtype == "float32" else 2
    ahead, lines = prefetch_ahead(rows, k * size), -(-lanes * size // LINE)
    loop = T.parallel if n * k * m >= PARALLEL_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def linear_float(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), dtype), y: T.Buffer((m, n), "float32")):
        T.func_attr({"tir.noalias": True})
        for jo in loop(n // block):
            for ji in range(block // rows):
                with T.sblock("rows"):
                    T.reads(x[0:m, 0:k], w[0:n, 0:k])
                    T.writes(y[0:m, 0:n])
                    acc = T.alloc_buffer((rows * m * lanes,), "float32")
                    j: T.let = jo * block + ji * rows
                    for r in T.unroll(rows * m):
                        for v in T.vectorized(lanes):
                            acc[r * lanes + v] = T.float32(0)
                    for c in range(whole):
                        for r in T.unroll(rows):
                            for u in T.unroll(lines):
                                T.evaluate(prefetch(w[j + ahead + r, c * lanes + u * (LINE // size)]))
                        for r in T.unroll(rows):
                            for i in T.unroll(m):
                                for v in T.vectorized(lanes):
                                    acc[(r * m + i) * lanes + v] += x[i, c * lanes + v] * widened(
                                        w[j + r, c * lanes + v], dtype
                                    )
                    for r in T.unroll(rows):
                        for i in T.unroll(m):
                            if lanes >= 32:
                                for v in T.vectorized(16):
                                    acc[(r * m + i) * lanes + v] += acc[(r * m + i) * lanes + v + 16]
                            if lanes >= 16:
                                for v in T.vectorized(8):
                                    acc[(r * m + i) * lanes + v] += acc[(r * m + i) * lanes + v + 8]
                            for v in T.vectorized(4):
                                acc[(r * m + i) * lanes + v] += acc[(r * m + i) * lanes + v + 4]
                            for v in T.unroll(3):
                                acc[(r * m + i) * lanes] += acc[(r * m + i) * lanes + v + 1]
                            for t in range(tail):
                                acc[(r * m + i) * lanes] += x[i, whole * lanes + t] * widened(
                                    w[j + r, whole * lanes + t], dtype
                                )
                            y[i, j + r] = acc[(r * m + i) * lanes]

    return linear_float
