"""w8a8 linear and table sigmoid, bit for bit as fastcar_compile.ops.quant defines them.

No float multiply feeds a float add here: LLVM would contract them into one rounding. A bias is added by another kernel.
"""

from __future__ import annotations

import numpy as np
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.kernels.linear import PARALLEL_ELEMENTS, block_rows

LANES = 64
_TINY = 1e-30
_INV_127 = float(np.float32(1.0) / np.float32(127.0))


def quantize_rows(m: int, k: int) -> PrimFunc:
    """Dynamic symmetric int8 per row: x float32 [m, k] -> q int8 [m, k], scale float32 [m]."""

    @T.prim_func(private=True, s_tir=True)
    def quantize_rows_i8(x: T.Buffer((m, k), "float32"), q: T.Buffer((m, k), "int8"), s: T.Buffer((m,), "float32")):
        T.func_attr({"tir.noalias": True})
        for i in range(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k])
                T.writes(q[0:m, 0:k], s[0:m])
                amax = T.alloc_buffer((1,), "float32", scope="local")
                inverse = T.alloc_buffer((1,), "float32", scope="local")
                amax[0] = T.float32(_TINY)
                for c in range(k):
                    amax[0] = T.max(amax[0], T.fabs(x[i, c]))
                inverse[0] = T.float32(127.0) / amax[0]
                s[i] = amax[0] * T.float32(_INV_127)
                for c in range(k):
                    q[i, c] = T.Cast(
                        "int8",
                        T.max(T.min(T.nearbyint(x[i, c] * inverse[0]), T.float32(127.0)), T.float32(-127.0)),
                    )

    return quantize_rows_i8


def linear_w8a8(m: int, n: int, k: int) -> PrimFunc:
    """y[m, n] = float(sum_k q[m, k] * w[n, k]) * (s[m] * ws[n]); the sum is exact in int32."""
    whole, tail = k // LANES, k % LANES
    block = block_rows(n)
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
            for ji, i in T.grid(block, m):
                with T.sblock("row"):
                    T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0:k], ws[0:n])
                    T.writes(y[0:m, 0:n])
                    acc = T.alloc_buffer((LANES,), "int32", scope="local")
                    for v in T.vectorized(LANES):
                        acc[v] = 0
                    for c in range(whole):
                        for v in T.vectorized(LANES):
                            acc[v] += T.Cast("int32", q[i, c * LANES + v]) * T.Cast("int32", w[jo * block + ji, c * LANES + v])
                    for v in range(1, LANES):
                        acc[0] += acc[v]
                    for t in range(tail):
                        acc[0] += T.Cast("int32", q[i, whole * LANES + t]) * T.Cast(
                            "int32", w[jo * block + ji, whole * LANES + t]
                        )
                    y[i, jo * block + ji] = T.Cast("float32", acc[0]) * (s[i] * ws[jo * block + ji])

    return linear_i8


def sigmoid_lut(size: int, knots: int) -> PrimFunc:
    """Table sigmoid of x float32 [size] with table int32 [knots]."""

    @T.prim_func(private=True, s_tir=True)
    def sigmoid_table(
        x: T.Buffer((size,), "float32"), table: T.Buffer((knots,), "int32"), y: T.Buffer((size,), "float32")
    ):
        T.func_attr({"tir.noalias": True})
        for i in range(size):
            with T.sblock("point"):
                T.reads(x[0:size], table[0:knots])
                T.writes(y[0:size])
                u = T.alloc_buffer((1,), "int32", scope="local")
                j = T.alloc_buffer((1,), "int32", scope="local")
                f = T.alloc_buffer((1,), "int32", scope="local")
                clamped: T.float32 = T.max(T.min(x[i], T.float32(16.0)), T.float32(-16.0))
                u[0] = T.Cast("int32", T.nearbyint(clamped * T.float32(1024.0))) + 16384
                j[0] = T.min(T.shift_right(u[0], 6), 511)
                f[0] = u[0] - T.shift_left(j[0], 6)
                y[i] = T.Cast(
                    "float32",
                    T.shift_right(table[j[0]] * (64 - f[0]) + table[j[0] + 1] * f[0] + 32, 6),
                ) * T.float32(2.0**-24)

    return sigmoid_table
