"""Activation, product with `up` and dynamic int8 quantisation of an MLP's inner row, in one kernel.

Bit for bit what the three operators give one after the other: there is no sum in it that could be reordered, and no
product feeds an addition in float32.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.linear.activation_factor import LANES, blend, fixed_input, knot
from fastcar_compile.codegen.tvm.kernels.linear.quantize_rows import PARALLEL_ROW_ELEMENTS, quantize_row
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.ops.activations import KNOTS


@kernel
def activate_quantize(m: int, k: int, activation: str) -> PrimFunc:
    """gate, up float32 [m, k], table int32 [513] -> q int8 [m, k], scale float32 [m] of gate * factor(gate) * up."""
    knots, whole = KNOTS, k // LANES
    loop = T.parallel if m > 1 and m * k >= PARALLEL_ROW_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def activate_quantize_i8(
        g: T.Buffer((m, k), "float32"),
        up: T.Buffer((m, k), "float32"),
        table: T.Buffer((knots,), "int32"),
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(g[0:m, 0:k], up[0:m, 0:k], table[0:knots])
                T.writes(q[0:m, 0:k], s[0:m])
                a = T.alloc_buffer((1, k), "float32")
                u = T.alloc_buffer((LANES,), "int32")
                low = T.alloc_buffer((LANES,), "int32")
                high = T.alloc_buffer((LANES,), "int32")
                for c in range(whole):
                    for v in T.vectorized(LANES):
                        u[v] = fixed_input(g[i, c * LANES + v], activation)
                    for v in T.unroll(LANES):
                        low[v] = table[knot(u[v])]
                        high[v] = table[knot(u[v]) + 1]
                    for v in T.vectorized(LANES):
                        a[0, c * LANES + v] = (g[i, c * LANES + v] * blend(low[v], high[v], u[v])) * up[
                            i, c * LANES + v
                        ]
                for t in range(k % LANES):
                    at: T.let = whole * LANES + t
                    w: T.let = fixed_input(g[i, at], activation)
                    a[0, at] = (g[i, at] * blend(table[knot(w)], table[knot(w) + 1], w)) * up[i, at]
                quantize_row(a, 0, q, s, i, k)

    return activate_quantize_i8
