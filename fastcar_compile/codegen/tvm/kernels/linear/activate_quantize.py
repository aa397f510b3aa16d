"""Activation, product with `up` and dynamic int8 quantisation of an MLP's inner rows, in one kernel.

Bit for bit what the three operators give one after the other: no sum could be reordered, and no float32 product feeds
an addition.
"""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, script
from fastcar_compile.codegen.tvm.kernels.linear.activation_factor import (
    TABLE_LANES,
    blend,
    fixed_input,
    read_knots,
    table_factor,
)
from fastcar_compile.codegen.tvm.kernels.linear.quantize_rows import quantize_row, row_loop
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.ops.activations import KNOTS


@kernel
def activate_quantize(m: int, k: int, activation: str, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return q int8 [m, k] and scale float32 [m] of gate * factor(gate) * up, gate and up float32 [m, k].

    The factor is read from table int32 [513].
    """
    knots, steps, loop, read = KNOTS, k // TABLE_LANES, row_loop(m, k), read_knots(isa)

    @script.prim_func(private=True, s_tir=True)
    def activate_quantize_i8(
        g: T.Buffer((m, k), "float32"),
        up: T.Buffer((m, k), "float32"),
        table: T.Buffer((knots,), "int32"),
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i in loop(m):
            with T.sblock("row"):
                T.reads(g[0:m, 0:k], up[0:m, 0:k], table[0:knots])
                T.writes(q[0:m, 0:k], s[0:m])
                # a: the row of products, which quantize_row reads twice: for its maximum and for its integers.
                a = T.alloc_buffer((1, k), "float32")
                u = T.alloc_buffer((TABLE_LANES,), "int32")
                low = T.alloc_buffer((TABLE_LANES,), "int32")
                high = T.alloc_buffer((TABLE_LANES,), "int32")
                # c: vectors along the row. v: vectorised, but for the reads of the table.
                for c in range(steps):
                    for v in T.vectorized(TABLE_LANES):
                        u[v] = fixed_input(g[i, c * TABLE_LANES + v], activation)
                    read(table, u, low, high)
                    # Both products are rounded in the order of the three operators that this kernel replaces.
                    for v in T.vectorized(TABLE_LANES):
                        a[0, c * TABLE_LANES + v] = (g[i, c * TABLE_LANES + v] * blend(low[v], high[v], u[v])) * up[
                            i, c * TABLE_LANES + v
                        ]
                for t in range(k % TABLE_LANES):
                    at: T.let = steps * TABLE_LANES + t
                    w: T.let = fixed_input(g[i, at], activation)
                    a[0, at] = (g[i, at] * table_factor(table, w)) * up[i, at]
                quantize_row(a, 0, q, s, i, k)

    return activate_quantize_i8
