"""Dynamic int8 quantisation of activation rows, bit for bit as fastcar_compile.ops.quant defines it."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel

TINY = 1e-30
INV_127 = float(np.float32(1.0) / np.float32(127.0))
LANES = 32


PARALLEL_ROW_ELEMENTS = 1 << 15
"""Elements of several rows from which a second thread pays for launching and awaiting a parallel region."""


def quantized(x: Any, inverse: Any) -> Any:
    """q of the definition."""
    return T.Cast("int8", T.max(T.min(T.nearbyint(x * inverse), T.float32(127.0)), T.float32(-127.0)))


@inlined
def quantize_row(x, at, q, s, i, k):
    """Row `at` of x [., k] -> row i of q int8 and s[i]. A maximum is exact in any order, so it is taken in lanes."""
    largest = T.alloc_buffer((LANES,), "float32")
    inverse = T.alloc_buffer((1,), "float32")
    for v in T.vectorized(LANES):
        largest[v] = T.float32(TINY)
    for c in range(k // LANES):
        for v in T.vectorized(LANES):
            largest[v] = T.max(largest[v], T.fabs(x[at, c * LANES + v]))
    for t in range(k % LANES):
        largest[0] = T.max(largest[0], T.fabs(x[at, k // LANES * LANES + t]))
    for v in range(1, LANES):
        largest[0] = T.max(largest[0], largest[v])
    inverse[0] = T.float32(127.0) / largest[0]
    s[i] = largest[0] * T.float32(INV_127)
    for c in range(k):
        q[i, c] = quantized(x[at, c], inverse[0])


@kernel
def quantize_rows(m: int, k: int) -> PrimFunc:
    """Dynamic symmetric int8 per row: x float32 [m, k] -> q int8 [m, k], scale float32 [m].

    No product feeds an addition: nothing can be contracted.
    """
    loop = T.parallel if m > 1 and m * k >= PARALLEL_ROW_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def quantize_rows_i8(x: T.Buffer((m, k), "float32"), q: T.Buffer((m, k), "int8"), s: T.Buffer((m,), "float32")):
        T.func_attr({"tir.noalias": True})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k])
                T.writes(q[0:m, 0:k], s[0:m])
                quantize_row(x, i, q, s, i, k)

    return quantize_rows_i8
