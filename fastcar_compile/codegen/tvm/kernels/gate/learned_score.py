"""Score of the gate `learned`: a network with one hidden layer on the MLP's input and its change."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS
from fastcar_compile.codegen.tvm.kernels.linear.weight_type import widen_weight
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, ahead, prefetch

LANES = 16
"""Of each of the two running sums of a unit, on every instruction set: one order of summation for all."""

LINE_WEIGHTS = LINE // 2
"""bfloat16 weights in a cache line."""


@kernel
def learned_score(rows: int, width: int, units: int) -> PrimFunc:
    """x, cached [rows, width], w1 bfloat16 [units, 2 width], b1, w2 [units], b2 [1] -> y [rows], all others float32.

    A unit sums x's products and those of the change apart, lane c mod 16 of each in the order of c; the rest of a
    width that is no multiple of 16 goes to the first lanes. Then lanes 0 .. 15 of both in order, b1, and the units in
    order from b2 on. Products may be fused with their sums: decisions are equal where the code is.
    """
    whole, tail = width // LANES, width % LANES
    later, _ = ahead(2, 4 * width)
    loop = T.parallel if units * 2 * width * rows >= PARALLEL_WEIGHTS else T.serial

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
                acc = T.alloc_buffer((2 * LANES,), "float32")
                for i in range(rows):
                    for v in T.vectorized(2 * LANES):
                        acc[v] = T.float32(0)
                    for c in range(whole):
                        if i == 0 and c % (LINE_WEIGHTS // LANES) == 0:
                            T.evaluate(prefetch(w1[u + later, c * LANES]))
                            T.evaluate(prefetch(w1[u + later, width + c * LANES]))
                        for v in T.vectorized(LANES):
                            acc[v] += x[i, c * LANES + v] * widen_weight(w1[u, c * LANES + v], "bfloat16")
                        for v in T.vectorized(LANES):
                            acc[LANES + v] += T.fabs(x[i, c * LANES + v] - cached[i, c * LANES + v]) * widen_weight(
                                w1[u, width + c * LANES + v], "bfloat16"
                            )
                    for t in range(tail):
                        acc[t] += x[i, whole * LANES + t] * widen_weight(w1[u, whole * LANES + t], "bfloat16")
                        acc[LANES + t] += T.fabs(x[i, whole * LANES + t] - cached[i, whole * LANES + t]) * widen_weight(
                            w1[u, width + whole * LANES + t], "bfloat16"
                        )
                    for v in range(1, 2 * LANES):
                        acc[0] += acc[v]
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
