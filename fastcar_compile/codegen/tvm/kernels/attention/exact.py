"""Attention of `numerics="exact"`, bit for bit as fastcar_compile.ops.exact defines it.

Two passes over the cached rows: one over the keys, whose logits are kept, and one over the values. Integer products are
in int32 lanes on every instruction set; a fence stands where LLVM could contract a product with the sum behind it.
"""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile import exact
from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.exact_logits import multiply_keys_of, round_query_of
from fastcar_compile.codegen.tvm.kernels.attention.exact_state import (
    ExactOperands,
    ExactShape,
    RoundedQuery,
    RowSums,
    not_a_number,
    tiles_of,
)
from fastcar_compile.codegen.tvm.kernels.attention.exact_values import add_values_of, weigh
from fastcar_compile.codegen.tvm.kernels.attention.online_softmax import PARALLEL_CACHE_ELEMENTS
from fastcar_compile.codegen.tvm.kernels.gate.fixed_point import INFINITY
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import magnitude_bits
from fastcar_compile.ops.cached import BLOCK


@kernel
def exact_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    window: tuple[int, int] | None = None,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return attention of query rows [B, Hq, T, D] to the int8 rows [B, Hkv, S, .] that they see: float32 as query.

    `window` is (sinks, window) of a ring cache; None: all rows up to the query's. Parallel over heads and query rows.
    """
    # One kernel serves all instruction sets: its integer lanes are plain TIR.
    del isa
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    shape = ExactShape(d, s, window)
    n, size, knots = shape.blocks, d + shape.blocks, exact.EXP_KNOTS + 1
    items = b * hq * t
    loop = T.parallel if items > 1 and items * s * d >= PARALLEL_CACHE_ELEMENTS else T.serial
    round_query, multiply_keys = round_query_of(shape), multiply_keys_of(shape, scale)
    add_values, held = add_values_of(shape), tiles_of(s) * BLOCK

    @script.prim_func(private=True, s_tir=True)
    def attend_exact(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, size), "int8"),
        values: T.Buffer((b, hkv, s, size), "int8"),
        position: T.Buffer((1,), "int64"),
        table: T.Buffer((knots,), "int32"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for item in loop(items):
            with T.sblock("row"):
                T.reads(
                    q[0:b, 0:hq, 0:t, 0:d],
                    keys[0:b, 0:hkv, 0:s, 0:size],
                    values[0:b, 0:hkv, 0:s, 0:size],
                    position[0:1],
                    table[0:knots],
                )
                T.writes(y[0:b, 0:hq, 0:t, 0:d])
                # One logit and one numerator per cached row, rounded up to whole tiles of 32 rows.
                logits = T.alloc_buffer((held,), "float32")
                weights = T.alloc_buffer((held,), "int32")
                mantissas = T.alloc_buffer((d,), "int32")
                exponents = T.alloc_buffer((n,), "int32")
                unknown = T.alloc_buffer((1,), "int32")
                # One tile of rows: numerators times powers of two, their integers, and the sums of a block of columns.
                scaled = T.alloc_buffer((BLOCK,), "float32")
                integers = T.alloc_buffer((BLOCK + 1,), "int32")
                acc = T.alloc_buffer((BLOCK,), "int32")
                total = T.alloc_buffer((1,), "float32")
                # stat: the maximum of the logits, and the inverse of the sum.
                # count: the sum of the numerators, exact in int64.
                stat = T.alloc_buffer((2,), "float32")
                count = T.alloc_buffer((1,), "int64")
                # out: the weighted values in whole blocks. columns: 1 where a block of columns is NaN.
                out = T.alloc_buffer((n * BLOCK,), "float32")
                columns = T.alloc_buffer((n,), "int32")
                bi: T.let = item // (hq * t)
                head: T.let = item // t % hq
                i: T.let = item % t
                first: T.let = T.Cast("int32", position[0])
                place: T.let = first + i
                newest: T.let = first + t - 1
                # A ring holds rows of any age, so all rows up to the newest one are scanned and `sees` decides.
                rows: T.let = T.min((place if window is None else newest) + 1, s)
                o = T.meta_var(ExactOperands(q, keys, values, table, y, (bi, head, head // (hq // hkv), i)))
                own = T.meta_var(RoundedQuery(mantissas, exponents, unknown))
                sums = T.meta_var(RowSums(logits, weights, scaled, integers, acc, total))
                round_query(o, own)
                multiply_keys(o, own, sums, rows, place, newest, stat)
                weigh(o, sums, rows, stat, count)
                add_values(o, sums, rows, out, columns)
                stat[1] = T.float32(1) / (T.Cast("float32", count[0]) * T.float32(2.0**-exact.EXP_BITS))
                # A maximum that is not finite makes the whole row NaN.
                if magnitude_bits(stat[0], 1) >= T.int32(INFINITY):
                    unknown[0] = 1
                # A NaN in a block of values makes the 32 columns of that block NaN, no others.
                for c in range(d):
                    y[bi, head, i, c] = T.Select(unknown[0] + columns[c // BLOCK] > 0, not_a_number(), out[c] * stat[1])

    return attend_exact
