"""Table factor of an activation, bit for bit as fastcar_compile.ops.activations defines it."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.ops.activations import FACTORS, INPUT_STEPS, KNOTS


def activation_factor(size: int, activation: str) -> PrimFunc:
    """Factor of x float32 [size] by the activation's table int32 [513]."""
    limit, steps = FACTORS[activation].limit, FACTORS[activation].input_scale
    knots = KNOTS

    @T.prim_func(private=True, s_tir=True)
    def factor_table(
        x: T.Buffer((size,), "float32"), table: T.Buffer((knots,), "int32"), y: T.Buffer((size,), "float32")
    ):
        T.func_attr({"tir.noalias": True})
        for i in range(size):
            with T.sblock("point"):
                T.reads(x[0:size], table[0:knots])
                T.writes(y[0:size])
                u = T.alloc_buffer((1,), "int32")
                j = T.alloc_buffer((1,), "int32")
                f = T.alloc_buffer((1,), "int32")
                clamped: T.let = T.max(T.min(x[i], T.float32(limit)), T.float32(-limit))
                u[0] = T.Cast("int32", T.nearbyint(clamped * T.float32(steps))) + INPUT_STEPS
                j[0] = T.min(T.shift_right(u[0], 6), knots - 2)
                f[0] = u[0] - T.shift_left(j[0], 6)
                y[i] = T.Cast(
                    "float32",
                    T.shift_right(table[j[0]] * (64 - f[0]) + table[j[0] + 1] * f[0] + 32, 6),
                ) * T.float32(2.0**-24)

    return factor_table
