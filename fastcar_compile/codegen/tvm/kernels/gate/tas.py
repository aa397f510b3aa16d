"""The temporal attention score."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.cache.elements import element, element_bytes, row_bytes
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, Expr, along, cast, prefetch, spread
from fastcar_compile.ops.attention import TAS_FRACTION_BITS, TAS_LIMIT, score_factor
from fastcar_compile.ops.cached import row_size

Shape = tuple[int, int, int, int]


def _fixed_point(x: Expr, lanes: int) -> Expr:
    """int64 of float64 in units of the score, within its limits; a NaN or an infinity gives the lower one."""
    limit = T.float64(TAS_LIMIT)
    bounded = T.max(T.min(T.nearbyint(x), limit), -limit)
    return cast("int64", T.Select(T.max(x, -x) < T.infinity("float64"), bounded, spread(-limit, lanes)), lanes)


@kernel
def tas(
    query: Shape, cache: Shape, stride: int, scale: float, dtype: str = "float32", isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Mean over heads of scale * <query, key at position - stride>: float32 [B], bit for bit as the operator."""
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, width = hq // hkv, row_size(d, dtype)
    lanes = next(v for v in (8, 4, 2, 1) if d % v == 0)
    lines = -(-row_bytes(d, dtype) // LINE) + 1  # a row need not begin with a line
    factor, one = score_factor(scale, hq), float(1 << TAS_FRACTION_BITS)

    @T.prim_func(private=True, s_tir=True)
    def temporal_score(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, width), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b,), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in range(b):
            with T.sblock("row"):
                T.reads(q[0:b, 0:hq, 0:t, 0:d], keys[0:b, 0:hkv, 0:s, 0:width], position[0:1])
                T.writes(y[0:b])
                acc = T.alloc_buffer((lanes,), "int64")
                product = T.alloc_buffer((lanes,), "float64")
                before: T.let = T.max(T.Cast("int32", position[0]) - stride, 0)
                for v in T.vectorized(lanes):
                    acc[v] = T.int64(0)
                for h in range(hkv):  # from as many pages; the waits for them overlap
                    for u in T.unroll(lines):
                        T.evaluate(prefetch(keys[i, h, before, u * (LINE // element_bytes(dtype))]))
                for h in range(hq):
                    for c in range(d // lanes):
                        for v in T.vectorized(lanes):
                            product[v] = (
                                T.Cast("float64", q[i, h, 0, c * lanes + v])
                                * T.Cast(
                                    "float64",
                                    element(keys, (i, h // group, before), c * lanes, v, d, dtype, isa),
                                )
                                * T.float64(one)
                            )
                        acc[along(0, lanes)] = acc[along(0, lanes)] + _fixed_point(product[along(0, lanes)], lanes)
                for v in T.unroll(lanes - 1):
                    acc[0] += acc[v + 1]
                y[i] = T.Cast("float32", acc[0]) * T.float32(factor)

    return temporal_score
