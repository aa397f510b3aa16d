"""float32 GEMV and small-batch GEMM."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

LANES = 32
"""Partial sums per dot product: two AVX-512 registers, or eight NEON ones."""

ROWS = 4
"""Weight rows read together: enough independent sums to hide the multiply-add latency, and four memory streams."""

PARALLEL_ELEMENTS = 1 << 18
"""Weights from which a second thread pays for the 5-10 us of a parallel region."""


def block_rows(n: int) -> int:
    """Output rows that one iteration of the (parallel) outer loop computes; a multiple of ROWS where n allows."""
    return next(r for r in (32, 16, 8, 4, 2, 1) if n % r == 0)


def linear(m: int, n: int, k: int) -> PrimFunc:
    """y[m, n] = sum_k x[m, k] * w[n, k], all float32; vectorised along k, parallel over blocks of n when it pays."""
    whole, tail = k // LANES, k % LANES
    block = block_rows(n)
    rows = min(ROWS, block)
    loop = T.parallel if n * k * m >= PARALLEL_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def linear_f32(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), "float32"), y: T.Buffer((m, n), "float32")):
        T.func_attr({"tir.noalias": True})
        for jo in loop(n // block):
            for ji, i in T.grid(block // rows, m):
                with T.sblock("rows"):
                    T.reads(x[0:m, 0:k], w[0:n, 0:k])
                    T.writes(y[0:m, 0:n])
                    acc = T.alloc_buffer((rows * LANES,), "float32")
                    j: T.let = jo * block + ji * rows
                    for r in T.unroll(rows):
                        for v in T.vectorized(LANES):
                            acc[r * LANES + v] = T.float32(0)
                    for c in range(whole):
                        for r in T.unroll(rows):
                            for v in T.vectorized(LANES):
                                acc[r * LANES + v] += x[i, c * LANES + v] * w[j + r, c * LANES + v]
                    for r in T.unroll(rows):
                        for v in T.vectorized(16):
                            acc[r * LANES + v] += acc[r * LANES + v + 16]
                        for v in T.vectorized(8):
                            acc[r * LANES + v] += acc[r * LANES + v + 8]
                        for v in T.vectorized(4):
                            acc[r * LANES + v] += acc[r * LANES + v + 4]
                        for v in T.unroll(3):
                            acc[r * LANES] += acc[r * LANES + v + 1]
                        for t in range(tail):
                            acc[r * LANES] += x[i, whole * LANES + t] * w[j + r, whole * LANES + t]
                        y[i, j + r] = acc[r * LANES]

    return linear_f32
