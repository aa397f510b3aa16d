"""Table factor of an activation, bit for bit as fastcar_compile.ops.activations defines it."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.ops.activations import FACTORS, INPUT_STEPS, KNOTS

TABLE_LANES = 16
"""Elements whose integer steps are vectorised. Only the table is read one element at a time."""


def fixed_input(x: Any, activation: str) -> Any:
    """Return u of the definition: x as an int32 in 1/64 of the table's step, from 0."""
    kind = FACTORS[activation]
    clamped = T.max(T.min(x, T.float32(kind.limit)), T.float32(-kind.limit))
    return T.Cast("int32", T.nearbyint(clamped * T.float32(kind.input_scale))) + INPUT_STEPS


def _knot(u: Any) -> Any:
    # i of the definition: the table entry at or before u.
    return T.min(T.shift_right(u, 6), KNOTS - 2)


def blend(low: Any, high: Any, u: Any) -> Any:
    """Return the factor between two neighbouring entries. The integer sum is rounded once, half up."""
    f = u - T.shift_left(_knot(u), 6)
    return T.Cast("float32", T.shift_right(low * (64 - f) + high * f + 32, 6)) * T.float32(2.0**-24)


def table_factor(table: Any, u: Any) -> Any:
    """Return the factor of one element."""
    return blend(table[_knot(u)], table[_knot(u) + 1], u)


@inlined
def read_knots(table, u, low, high):
    """Read the table entries around u int32 [16] to low and high."""
    for v in T.unroll(TABLE_LANES):
        low[v] = table[_knot(u[v])]
        high[v] = table[_knot(u[v]) + 1]


@kernel
def activation_factor(size: int, activation: str) -> PrimFunc:
    """Return the factor float32 [size] of x float32 [size] by the activation's table int32 [513]."""
    knots = KNOTS

    @script.prim_func(private=True, s_tir=True)
    def factor_table(
        x: T.Buffer((size,), "float32"), table: T.Buffer((knots,), "int32"), y: T.Buffer((size,), "float32")
    ):
        for block in range(size // TABLE_LANES):
            with T.sblock("points"):
                T.reads(x[0:size], table[0:knots])
                T.writes(y[0:size])
                u = T.alloc_buffer((TABLE_LANES,), "int32")
                low = T.alloc_buffer((TABLE_LANES,), "int32")
                high = T.alloc_buffer((TABLE_LANES,), "int32")
                for v in T.vectorized(TABLE_LANES):
                    u[v] = fixed_input(x[block * TABLE_LANES + v], activation)
                read_knots(table, u, low, high)
                for v in T.vectorized(TABLE_LANES):
                    y[block * TABLE_LANES + v] = blend(low[v], high[v], u[v])
        for i in range(size % TABLE_LANES):
            with T.sblock("point"):
                T.reads(x[0:size], table[0:knots])
                T.writes(y[0:size])
                at: T.let = size // TABLE_LANES * TABLE_LANES + i
                w: T.let = fixed_input(x[at], activation)
                y[at] = table_factor(table, w)

    return factor_table
