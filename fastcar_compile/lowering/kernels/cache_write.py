"""The key/value cache append."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels import OPAQUE
from fastcar_compile.lowering.kernels.half import narrowed

Shape = tuple[int, int, int, int]


def cache_write(cache: Shape, rows: int, dtype: str = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """In place: cache [B, H, S, D] of `dtype` gets value [B, H, rows, D] from row `position` on.

    Rows beyond S are dropped.
    """
    b, h, s, d = cache

    @T.prim_func(private=True, s_tir=True)
    def append(
        keys: T.Buffer((b, h, s, d), dtype),
        value: T.Buffer((b, h, rows, d), "float32"),
        position: T.Buffer((1,), "int64"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i, j, r in T.grid(b, h, rows):
            with T.sblock("row"):
                T.reads(value[0:b, 0:h, 0:rows, 0:d], position[0:1])
                T.writes(keys[0:b, 0:h, 0:s, 0:d])
                at: T.let = T.Cast("int32", position[0]) + r
                if at < s:
                    for c in T.vectorized(d):
                        keys[i, j, at, c] = narrowed(value[i, j, r, c], dtype, isa)

    return append
