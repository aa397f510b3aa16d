"""Score of the gate `learned`: a network with one hidden layer over the MLP's input and its change."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS
from fastcar_compile.codegen.tvm.kernels.linear.weight_type import widen_weight
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, Expr, prefetch, prefetch_distance

SUM_LANES = 16
"""Partial sums of each half of a unit on every instruction set, so that all have one order of summation."""

LINE_WEIGHTS = LINE // 2
"""bfloat16 weights in a cache line."""


@dataclass(frozen=True)
class _Operands:
    """x and cached float32 [B, H], w bfloat16 [units, 2 H]: a unit's weights of x, then those of the change."""

    x: Any
    cached: Any
    w: Any

    def change(self, i: Expr, c: Expr) -> Expr:
        """Return the change of an element."""
        return T.fabs(self.x[i, c] - self.cached[i, c])

    def weight(self, u: Expr, c: Expr) -> Expr:
        """Return a weight as float32."""
        return widen_weight(self.w[u, c], "bfloat16")


def _add_unit(width: int) -> Any:
    """Return the macro (o, i, u, acc): the sum of unit u for row i goes to acc[0]; acc is float32 [2 * SUM_LANES]."""
    steps, tail = divmod(width, SUM_LANES)
    rows_ahead, _ = prefetch_distance(2, 4 * width)

    @inlined
    def add_unit(o, i, u, acc):
        for v in T.vectorized(2 * SUM_LANES):
            acc[v] = T.float32(0)
        # c: vectors of the row; both partial sums are in registers. v: one vector of each half.
        for c in range(steps):
            if i == 0 and c % (LINE_WEIGHTS // SUM_LANES) == 0:
                T.evaluate(prefetch(o.w[u + rows_ahead, c * SUM_LANES]))
                T.evaluate(prefetch(o.w[u + rows_ahead, width + c * SUM_LANES]))
            for v in T.vectorized(SUM_LANES):
                acc[v] += o.x[i, c * SUM_LANES + v] * o.weight(u, c * SUM_LANES + v)
            for v in T.vectorized(SUM_LANES):
                acc[SUM_LANES + v] += o.change(i, c * SUM_LANES + v) * o.weight(u, width + c * SUM_LANES + v)
        for t in range(tail):
            acc[t] += o.x[i, steps * SUM_LANES + t] * o.weight(u, steps * SUM_LANES + t)
            acc[SUM_LANES + t] += o.change(i, steps * SUM_LANES + t) * o.weight(u, width + steps * SUM_LANES + t)
        for v in range(1, 2 * SUM_LANES):
            acc[0] += acc[v]

    return add_unit


@kernel
def learned_score(rows: int, width: int, units: int) -> PrimFunc:
    """Return float32 [B] = b2 + sum_u relu(b1[u] + <w1[u], [x, |x - cached|]>) * w2[u].

    x, cached float32 [B, H], w1 bfloat16 [units, 2 H], b1, w2 float32 [units], b2 float32 [1]. A unit sums the
    products of x and those of the change apart: element c goes to lane c mod 16 of its half, in the order of c. Then
    the lanes of both halves are added in order, then b1. Products may be fused with their sums, so decisions are equal
    where the code is. Parallel over units.
    """
    loop = T.parallel if units * 2 * width * rows >= PARALLEL_WEIGHTS else T.serial
    add_unit = _add_unit(width)

    @T.prim_func(private=True, s_tir=True)
    def gate_network(
        x: T.Buffer((rows, width), "float32"),
        cached: T.Buffer((rows, width), "float32"),
        w1: T.Buffer((units, 2 * width), "bfloat16"),
        b1: T.Buffer((units,), "float32"),
        w2: T.Buffer((units,), "float32"),
        b2: T.Buffer((1,), "float32"),
        y: T.Buffer((rows,), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        hidden = T.alloc_buffer((rows, units), "float32")
        for u in loop(units):
            with T.sblock("unit"):
                T.reads(x[0:rows, 0:width], cached[0:rows, 0:width], w1[0:units, 0 : 2 * width], b1[0:units])
                T.writes(hidden[0:rows, 0:units])
                acc = T.alloc_buffer((2 * SUM_LANES,), "float32")
                for i in range(rows):
                    add_unit(_Operands(x, cached, w1), i, u, acc)
                    hidden[i, u] = acc[0] + b1[u]
        for i in range(rows):
            with T.sblock("row"):
                T.reads(hidden[0:rows, 0:units], w2[0:units], b2[0:1])
                T.writes(y[0:rows])
                total = T.alloc_buffer((1,), "float32")
                total[0] = b2[0]
                for u in range(units):
                    # Not max(0, …), which would lose a NaN.
                    total[0] += T.Select(hidden[i, u] <= T.float32(0), T.float32(0), hidden[i, u]) * w2[u]
                y[i] = total[0]

    return gate_network
