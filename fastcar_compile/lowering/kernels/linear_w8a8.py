"""int8 GEMV with exact int32 accumulation, bit for bit as fastcar_compile.ops.quant defines it."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels.linear import PARALLEL_ELEMENTS, ROWS, block_rows

LANES = 32
STEP = 2 * LANES


def linear_w8a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """y[m, n] = float(sum_k q[m, k] * w[n, k]) * (s[m] * ws[n]); the sum is exact in int32.

    Two products are added in int16 before they are widened: |q| <= 127 and |w| <= 128, so 2 * 127 * 128 < 2**15.
    The bias is added by another kernel: LLVM would contract the last product and the addition into one rounding.
    """
    whole, tail = k // STEP, k % STEP
    block = block_rows(n)
    rows = min(ROWS, block)
    loop = T.parallel if n * k * m >= 2 * PARALLEL_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def linear_i8(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, k), "int8"),
        ws: T.Buffer((n,), "float32"),
        y: T.Buffer((m, n), "float32"),
    ):
        T.func_attr({"tir.noalias": True})
        for jo in loop(n // block):
            for ji, i in T.grid(block // rows, m):
                with T.sblock("rows"):
                    T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0:k], ws[0:n])
                    T.writes(y[0:m, 0:n])
                    acc = T.alloc_buffer((rows * LANES,), "int32", scope="local")
                    j: T.int32 = jo * block + ji * rows
                    for r in T.unroll(rows):
                        for v in T.vectorized(LANES):
                            acc[r * LANES + v] = 0
                    for c in range(whole):
                        for r in T.unroll(rows):
                            for v in T.vectorized(LANES):
                                acc[r * LANES + v] += T.Cast(
                                    "int32",
                                    T.Cast("int16", q[i, c * STEP + v]) * T.Cast("int16", w[j + r, c * STEP + v])
                                    + T.Cast("int16", q[i, c * STEP + LANES + v])
                                    * T.Cast("int16", w[j + r, c * STEP + LANES + v]),
                                )
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
                            acc[r * LANES] += T.Cast("int32", q[i, whole * STEP + t]) * T.Cast(
                                "int32", w[j + r, whole * STEP + t]
                            )
                        y[i, j + r] = T.Cast("float32", acc[r * LANES]) * (s[i] * ws[j + r])

    return linear_i8
