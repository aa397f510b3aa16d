"""Dynamic int8 quantisation of activation rows, bit for bit as fastcar_compile.ops.quant defines it."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel

TINY = 1e-30
INV_127 = float(np.float32(1.0) / np.float32(127.0))
MAX_LANES = 32
"""Independent maxima of a row."""

PARALLEL_ROW_ELEMENTS = 1 << 15
"""Elements of several rows from which a second thread pays for launching and awaiting a parallel region."""


def row_loop(m: int, k: int) -> Any:
    """Return the loop over m rows of k elements: parallel where a second thread pays."""
    return T.parallel if m > 1 and m * k >= PARALLEL_ROW_ELEMENTS else T.serial


def _quantized(x: Any, inverse: Any) -> Any:
    # Rounded half to even, then clamped: -128 is never used.
    return T.Cast("int8", T.max(T.min(T.nearbyint(x * inverse), T.float32(127.0)), T.float32(-127.0)))


@inlined
def quantize_row(x, at, q, s, i, k):
    """Quantise row `at` of x float32 [., k] to row i of q int8 [m, k] and s[i].

    The maximum is taken in lanes, because a maximum is exact in any order.
    """
    largest = T.alloc_buffer((MAX_LANES,), "float32")
    inverse = T.alloc_buffer((1,), "float32")
    # TINY is the floor of a maximum, so that a row of zeros has a finite inverse.
    for v in T.vectorized(MAX_LANES):
        largest[v] = T.float32(TINY)
    # c: vectors of 32 along the row. 32 maxima stay in registers.
    for c in range(k // MAX_LANES):
        for v in T.vectorized(MAX_LANES):
            largest[v] = T.max(largest[v], T.fabs(x[at, c * MAX_LANES + v]))
    for t in range(k % MAX_LANES):
        largest[0] = T.max(largest[0], T.fabs(x[at, k // MAX_LANES * MAX_LANES + t]))
    for v in range(1, MAX_LANES):
        largest[0] = T.max(largest[0], largest[v])
    # A true division: the reciprocal times 127 would round twice.
    inverse[0] = T.float32(127.0) / largest[0]
    # The definition multiplies by the rounded 1 / 127.
    s[i] = largest[0] * T.float32(INV_127)
    # A plain loop, which LLVM vectorises. TVM would scalarise a T.vectorized one because of T.nearbyint.
    for c in range(k):
        q[i, c] = _quantized(x[at, c], inverse[0])


@kernel
def quantize_rows(m: int, k: int) -> PrimFunc:
    """Return q int8 [m, k] and scale float32 [m] of x float32 [m, k], symmetric per row.

    No product feeds an addition, so LLVM can contract nothing.
    """
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def quantize_rows_i8(x: T.Buffer((m, k), "float32"), q: T.Buffer((m, k), "int8"), s: T.Buffer((m,), "float32")):
        for i in loop(m):
            with T.sblock("row"):
                T.reads(x[0:m, 0:k])
                T.writes(q[0:m, 0:k], s[0:m])
                quantize_row(x, i, q, s, i, k)

    return quantize_rows_i8
