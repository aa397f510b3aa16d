"""float32 GEMV and small-batch GEMM."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

LANES = 64
"""Partial sums per dot product: four 16-lane registers hide the latency of the multiply-add."""

PARALLEL_ELEMENTS = 1 << 18
"""Weights from which a second thread pays for the 5-10 us of a parallel region."""


def block_rows(n: int) -> int:
    """Output rows that one task of a parallel loop computes."""
    return next(r for r in (32, 16, 8, 4, 2, 1) if n % r == 0)


def linear(m: int, n: int, k: int) -> PrimFunc:
    """y[m, n] = sum_k x[m, k] * w[n, k], all float32; vectorised along k, parallel over blocks of n when it pays."""
    whole, tail = k // LANES, k % LANES
    block = block_rows(n)
    loop = T.parallel if n * k * m >= PARALLEL_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def linear_f32(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), "float32"), y: T.Buffer((m, n), "float32")):
        T.func_attr({"tir.noalias": True})
        for jo in loop(n // block):
            for ji, i in T.grid(block, m):
                with T.sblock("row"):
                    T.reads(x[0:m, 0:k], w[0:n, 0:k])
                    T.writes(y[0:m, 0:n])
                    acc = T.alloc_buffer((LANES,), "float32", scope="local")
                    for v in T.vectorized(LANES):
                        acc[v] = T.float32(0)
                    for c in range(whole):
                        for v in T.vectorized(LANES):
                            acc[v] += x[i, c * LANES + v] * w[jo * block + ji, c * LANES + v]
                    for v in T.vectorized(32):
                        acc[v] += acc[v + 32]
                    for v in T.vectorized(16):
                        acc[v] += acc[v + 16]
                    for v in T.vectorized(8):
                        acc[v] += acc[v + 8]
                    for v in T.vectorized(4):
                        acc[v] += acc[v + 4]
                    for v in range(1, 4):
                        acc[0] += acc[v]
                    for t in range(tail):
                        acc[0] += x[i, whole * LANES + t] * w[jo * block + ji, whole * LANES + t]
                    y[i, jo * block + ji] = acc[0]

    return linear_f32
