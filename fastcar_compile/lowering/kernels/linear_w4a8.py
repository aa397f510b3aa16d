"""int4 GEMV in groups of 128, exact int32 group sums, bit for bit as fastcar_compile.ops.quant defines it."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels.linear import PARALLEL_ELEMENTS, block_rows
from fastcar_compile.ops.quant import GROUP

LANES = 16
"""int16 lanes of one group's sum: each adds 8 products of at most 127 * 8, which int16 holds."""

HALF = GROUP // 2
_FLOAT_EXPONENT = 112 << 23
"""Difference of the exponent biases of float32 and float16, in place."""


def linear_w4a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Group by group: y = float(sum q * w) * ws, added in ascending order; then times the row's scale.

    q int8 [m, k], s float32 [m], w uint8 [n, 64 * G] (`ops.quant.pack_int4`), ws float16 [n, G], y float32 [m, n].
    The fence keeps LLVM from contracting a product and the addition after it into one rounding. As for w8a8, another
    kernel adds the bias.
    """
    groups = -(-k // GROUP)
    block = block_rows(n)
    padded = groups * GROUP
    loop = T.parallel if n * k * m >= 2 * PARALLEL_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def linear_i4(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, groups * HALF), "uint8"),
        ws: T.Buffer((n, groups), "float16"),
        y: T.Buffer((m, n), "float32"),
    ):
        T.func_attr({"tir.noalias": True})
        for i in range(m):
            with T.sblock("row"):
                T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0 : groups * HALF], ws[0:n, 0:groups])
                T.writes(y[0:m, 0:n])
                x = T.alloc_buffer((padded,), "int8")
                for t in range(padded):
                    x[t] = T.if_then_else(t < k, q[i, T.min(t, k - 1)], T.int8(0))
                for jo in loop(n // block):
                    for ji in range(block):
                        total = T.alloc_buffer((1,), "float32", scope="local")
                        acc = T.alloc_buffer((LANES,), "int16", scope="local")
                        whole = T.alloc_buffer((LANES,), "int32", scope="local")
                        j: T.int32 = jo * block + ji
                        total[0] = T.float32(0)
                        for g in range(groups):
                            for v in T.vectorized(LANES):
                                acc[v] = T.int16(0)
                            for c in T.unroll(HALF // LANES):
                                for v in T.vectorized(LANES):
                                    acc[v] += T.shift_right(
                                        T.Cast("int16", T.shift_left(w[j, g * HALF + c * LANES + v], T.uint8(4)))
                                        * T.int16(256),
                                        T.int16(12),
                                    ) * T.Cast("int16", x[g * GROUP + c * LANES + v]) + T.shift_right(
                                        T.Cast("int16", w[j, g * HALF + c * LANES + v]) * T.int16(256), T.int16(12)
                                    ) * T.Cast("int16", x[g * GROUP + HALF + c * LANES + v])
                            for v in T.vectorized(LANES):
                                whole[v] = T.Cast("int32", acc[v])
                            for v in T.vectorized(8):
                                whole[v] += whole[v + 8]
                            for v in T.vectorized(4):
                                whole[v] += whole[v + 4]
                            for v in T.unroll(3):
                                whole[0] += whole[v + 1]
                            total[0] += T.call_llvm_pure_intrin(
                                "float32",
                                "llvm.arithmetic.fence",
                                T.Cast("float32", whole[0])
                                * T.reinterpret(
                                    "float32",
                                    T.shift_left(T.Cast("uint32", T.reinterpret("uint16", ws[j, g])), T.uint32(13))
                                    + T.uint32(_FLOAT_EXPONENT),
                                ),
                            )
                        y[i, j] = total[0] * s[i]

    return linear_i4
