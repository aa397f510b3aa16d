"""The temporal attention score (TAS)."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape
from fastcar_compile.codegen.tvm.kernels.cache.elements import RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, Expr, broadcast, cast, prefetch, ramp
from fastcar_compile.drs.score import TAS_FRACTION_BITS, TAS_LIMIT, score_factor


def _fixed_point(x: Expr, lanes: int) -> Expr:
    """Return float64 in units of the score as int64, within the limits. A NaN or an infinity gives the lower limit."""
    limit = T.float64(TAS_LIMIT)
    bounded = T.max(T.min(T.nearbyint(x), limit), -limit)
    return cast("int64", T.Select(T.max(x, -x) < T.infinity("float64"), bounded, broadcast(-limit, lanes)), lanes)


@kernel
def tas(
    query: HeadShape,
    cache: HeadShape,
    stride: int,
    scale: float,
    dtype: str = "float32",
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return the mean over heads of scale * <query, key at position - stride>: float32 [B].

    query float32 [B, Hq, T, D], of which row 0 counts, keys [B, Hkv, S, D] of `dtype`. Bit for bit as the operator:
    each product is rounded to fixed point, and integer sums are exact in any order.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, keys_of = hq // hkv, RowFormat(d, dtype, isa)
    width = keys_of.size
    lanes = next(v for v in (8, 4, 2, 1) if d % v == 0)
    lines = -(-keys_of.bytes // LINE) + 1  # a row need not begin with a line
    factor, one = score_factor(scale, hq), float(1 << TAS_FRACTION_BITS)

    @inlined
    def prefetch_keys(keys, i, before):
        # The keys of the heads are in as many pages. The waits for them overlap.
        for h in range(hkv):
            for u in T.unroll(lines):
                T.evaluate(prefetch(keys[i, h, before, u * keys_of.elements_of(LINE)]))

    @inlined
    def add_head(q, key, i, h, acc, product):
        # c: vectors of the head. v: one vector.
        for c in range(d // lanes):
            for v in T.vectorized(lanes):
                product[v] = (
                    T.Cast("float64", q[i, h, 0, c * lanes + v])
                    * T.Cast("float64", keys_of.element(key, c * lanes, v))
                    * T.float64(one)
                )
            acc[ramp(0, lanes)] = acc[ramp(0, lanes)] + _fixed_point(product[ramp(0, lanes)], lanes)

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
                prefetch_keys(keys, i, before)
                for h in range(hq):
                    add_head(q, row_at(keys, i, h // group, before), i, h, acc, product)
                for v in T.unroll(lanes - 1):
                    acc[0] += acc[v + 1]
                y[i] = T.Cast("float32", acc[0]) * T.float32(factor)

    return temporal_score
