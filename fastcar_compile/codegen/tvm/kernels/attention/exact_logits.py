"""Exact attention: the query in wide blocks, and its logits with the rows of an int8 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from fastcar_compile import exact
from fastcar_compile.codegen.tvm.kernels.attention.exact_state import ExactShape, not_a_number, tiles_of, wide_exponent
from fastcar_compile.codegen.tvm.kernels.cache.elements import power_of_two
from fastcar_compile.codegen.tvm.kernels.gate.fixed_point import INFINITY
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import (
    Expr,
    broadcast,
    cast,
    fence,
    magnitude_bits,
    ramp,
    reduce_add,
)
from fastcar_compile.ops.cached import BLOCK, INT8_MAX
from fastcar_compile.ops.cached import NOT_A_NUMBER as NAN_EXPONENT

MINUS_INFINITY = -0x800000
"""The bits of minus infinity, as TVM takes no such literal."""


def _bounded(value: Expr) -> Expr:
    return T.max(T.min(value, T.float32(INT8_MAX)), T.float32(-INT8_MAX))


def round_query_of(shape: ExactShape) -> Callable[..., None]:
    """Return the macro (o, query): the query's row in wide blocks."""
    d = shape.d

    @inlined
    def round_query(o, query):
        top = T.alloc_buffer((1,), "int32")
        query.unknown[0] = 0
        # Scalar, because the query is rounded once for all cached rows.
        for e in range(shape.blocks):
            top[0] = 0
            for c in range(T.min(BLOCK, d - e * BLOCK)):
                top[0] = T.max(top[0], magnitude_bits(o.q[o.at[0], o.at[1], o.at[3], e * BLOCK + c], 1))
            # Magnitude bits above infinity's are a NaN.
            query.unknown[0] = T.max(query.unknown[0], T.Cast("int32", top[0] > T.int32(INFINITY)))
            query.exponents[e] = wide_exponent(T.min(top[0], T.reinterpret("int32", T.float32(INT8_MAX))))
            for c in range(T.min(BLOCK, d - e * BLOCK)):
                query.mantissas[e * BLOCK + c] = T.Cast(
                    "int32",
                    T.nearbyint(
                        _bounded(o.q[o.at[0], o.at[1], o.at[3], e * BLOCK + c]) * power_of_two(0 - query.exponents[e])
                    ),
                )

    return round_query


def multiply_keys_of(shape: ExactShape, scale: float) -> Callable[..., None]:
    """Return the macro (o, query, sums, rows, position, newest, stat): the logits, and stat[0] their maximum.

    The logit of a row that is not seen is NaN, up to the end of the last tile. query.unknown[0] becomes 1 where that of
    one that is seen is NaN.
    """
    d, lanes, factor = shape.d, shape.lanes, float(exact.logit_factor(scale))
    # Whole blocks have a fixed number of vectors, which are unrolled.
    loop = T.unroll if d % BLOCK == 0 else T.serial

    def vectors_of(e: Expr) -> Expr:
        return BLOCK // lanes if d % BLOCK == 0 else T.min(BLOCK, d - e * BLOCK) // lanes

    def total_of(acc: Any) -> Expr:
        return reduce_add(acc[ramp(0, lanes)], lanes) if lanes > 1 else acc[0]

    @inlined
    def multiply_row(o, query, sums, j):
        sums.total[0] = T.float32(0)
        # e: blocks in order, whose sums are added in float32. c: vectors of a block, in registers.
        for e in T.unroll(shape.blocks):
            # 32 products of at most 2^14 * 2^7: a block's sum is at most 2^26, exact in int32. The cast rounds it once.
            sums.acc[ramp(0, lanes)] = broadcast(T.int32(0), lanes)
            for c in loop(vectors_of(e)):
                sums.acc[ramp(0, lanes)] = sums.acc[ramp(0, lanes)] + query.mantissas[
                    ramp(e * BLOCK + c * lanes, lanes)
                ] * cast("int32", o.keys[o.at[0], o.at[2], j, ramp(e * BLOCK + c * lanes, lanes)], lanes)
            # The product's exponent is the sum of both, limited to those of normal powers of two.
            power: T.let = query.exponents[e] + T.Cast("int32", o.keys[o.at[0], o.at[2], j, d + e])
            sums.total[0] = sums.total[0] + fence(
                "float32", T.Cast("float32", total_of(sums.acc)) * power_of_two(T.max(T.min(power, 127), -126))
            )
            # A key's block with a NaN has zero mantissas, so its product does not show the NaN.
            if o.keys[o.at[0], o.at[2], j, d + e] == T.int8(NAN_EXPONENT):
                query.unknown[0] = 1
        sums.logits[j] = sums.total[0] * T.float32(factor)

    @inlined
    def multiply_keys(o, query, sums, rows, position, newest, stat):
        stat[0] = T.reinterpret("float32", T.int32(MINUS_INFINITY))
        for j in range(tiles_of(rows) * BLOCK):
            # NaN marks a row that is not seen, and `weigh` turns it into UNSEEN.
            sums.logits[j] = not_a_number()
            if T.And(j < rows, shape.sees(j, position, newest)):
                multiply_row(o, query, sums, j)
                if magnitude_bits(sums.logits[j], 1) > T.int32(INFINITY):  # TVM takes x != x for false
                    query.unknown[0] = 1
                # T.max may lose a NaN. query.unknown[0] remembers it.
                stat[0] = T.max(stat[0], sums.logits[j])

    return multiply_keys
