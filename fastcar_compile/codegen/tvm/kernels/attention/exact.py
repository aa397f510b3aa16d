"""Attention of `numerics="exact"`, bit for bit as fastcar_compile.ir.ops.exact defines it.

Two passes over the cached rows: one over the keys, whose logits are kept, and one over the values. Products of int16
are added in int32, exactly, in any order; a fence stands where LLVM could contract a product with the sum behind it.
"""

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script, vectors
from fastcar_compile.codegen.tvm.kernels.attention.decode import PARALLEL_CACHE_ELEMENTS
from fastcar_compile.codegen.tvm.kernels.attention.exact_shape import (
    ROWS,
    ExactShape,
    mantissas,
    not_a_number,
    row_buffers,
    tiles_of,
    wide_exponent,
)
from fastcar_compile.codegen.tvm.kernels.attention.exact_values import add_values, weigh
from fastcar_compile.codegen.tvm.kernels.cache import bounded, number_of, power_of_two
from fastcar_compile.codegen.tvm.kernels.linear.activations import read_knots
from fastcar_compile.codegen.tvm.kernels.tas import INFINITY
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, broadcast, cast, fence, magnitude_bits, ramp
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import BLOCK, INT8_MAX
from fastcar_compile.ir.ops.operator import NOT_A_NUMBER as NAN_EXPONENT

FOUR = ramp(0, ROWS)

MINUS_INFINITY = -0x800000
"""The bits of minus infinity, as TVM takes no such literal."""


@script.inlined
def _round_query(shape, o, query):
    """Round the query's row to wide blocks."""
    top = T.alloc_buffer((1,), "int32")
    query.unknown[0] = 0
    # Scalar, because the query is rounded once for all cached rows.
    for e in range(shape.blocks):
        top[0] = 0
        for c in range(T.min(BLOCK, shape.d - e * BLOCK)):
            top[0] = T.max(top[0], magnitude_bits(o.q[o.at[0], o.at[1], o.at[3], e * BLOCK + c], 1))
        # Magnitude bits above infinity's are a NaN.
        query.unknown[0] = T.max(query.unknown[0], T.Cast("int32", top[0] > T.int32(INFINITY)))
        query.exponents[e] = wide_exponent(T.min(top[0], T.reinterpret("int32", T.float32(INT8_MAX))))
        for c in range(T.min(BLOCK, shape.d - e * BLOCK)):
            query.mantissas[e * BLOCK + c] = T.Cast(
                "int16",
                T.nearbyint(
                    bounded(o.q[o.at[0], o.at[1], o.at[3], e * BLOCK + c]) * power_of_two(0 - query.exponents[e])
                ),
            )


def _steps_of(shape: ExactShape, e: Expr) -> Expr:
    """Return the steps of a block. Whole blocks have a fixed number of them, which are unrolled."""
    width = shape.dot.width
    return BLOCK // width if shape.d % BLOCK == 0 else T.min(BLOCK, shape.d - e * BLOCK) // width


def _total_of(acc: Any, lanes: int) -> Expr:
    return vectors.reduce_add(acc[ramp(0, lanes)], lanes) if lanes > 1 else acc[0]


def _exponents(o: Any, shape: ExactShape, j: Expr, e: Expr) -> Expr:
    rows = (o.keys[o.at[4], o.at[2], T.min(j + u, shape.s - 1), shape.d + e] for u in range(ROWS))
    return T.Cast(f"int32x{ROWS}", vectors.vector_of(list(rows)))


@script.inlined
def _multiply_rows(shape, dot, loop, o, query, sums, j):
    """Write the logits of four cached rows to sums.logits; a block that is NaN makes its row NaN."""
    sums.total[FOUR] = T.Broadcast(T.float32(0), ROWS)
    # e: blocks in order, whose sums are added in float32. c: vectors of a block, in registers.
    for e in T.unroll(shape.blocks):
        # 32 products of at most 2^14 * 2^7: a block's sum is at most 2^26, exact in int32. The cast rounds it once.
        for u in T.unroll(ROWS):
            sums.acc[ramp(0, dot.lanes)] = broadcast(T.int32(0), dot.lanes)
            for c in loop(_steps_of(shape, e)):
                sums.acc[ramp(0, dot.lanes)] = dot.step(
                    sums.acc[ramp(0, dot.lanes)],
                    query.mantissas[ramp(e * BLOCK + c * dot.width, dot.width)],
                    mantissas(
                        o.keys,
                        (o.at[4], o.at[2], T.min(j + u, shape.s - 1)),
                        e * BLOCK + c * dot.width,
                        dot.width,
                    ),
                )
            sums.four[u] = _total_of(sums.acc, dot.lanes)
        sums.exponents[FOUR] = _exponents(o, shape, j, e)
        # The product's exponent is the sum of both, limited to those of normal powers of two.
        sums.powers[FOUR] = T.max(
            T.min(sums.exponents[FOUR] + T.Broadcast(query.exponents[e], ROWS), T.Broadcast(T.int32(127), ROWS)),
            T.Broadcast(T.int32(-126), ROWS),
        )
        sums.total[FOUR] = sums.total[FOUR] + fence(
            f"float32x{ROWS}", cast("float32", sums.four[FOUR], ROWS) * power_of_two(sums.powers[FOUR], ROWS)
        )
        # A key's block with a NaN has zero mantissas, so its product does not show the NaN.
        sums.total[FOUR] = T.Select(
            sums.exponents[FOUR] == T.Broadcast(T.int32(NAN_EXPONENT), ROWS),
            T.Broadcast(not_a_number(), ROWS),
            sums.total[FOUR],
        )
    sums.logits[ramp(j, ROWS)] = sums.total[FOUR] * T.Broadcast(T.float32(shape.factor), ROWS)


@script.inlined
def _multiply_keys(shape, o, query, sums, rows, position, newest):
    """Write the logits, and their maximum to sums.stat[0].

    The logit of a row that is not seen is NaN, up to the end of the last tile. query.unknown[0] becomes 1 where that of
    one that is seen is NaN.
    """
    sums.most[FOUR] = T.Broadcast(T.reinterpret("float32", T.int32(MINUS_INFINITY)), ROWS)
    sums.unknown[FOUR] = T.Broadcast(T.int32(0), ROWS)
    for part in range(tiles_of(rows) * (BLOCK // ROWS)):
        _multiply_rows(shape, shape.dot, T.unroll if shape.d % BLOCK == 0 else T.serial, o, query, sums, part * ROWS)
        at = T.meta_var(ramp(part * ROWS, ROWS))
        seen = T.meta_var(
            T.And(
                T.Ramp(part * ROWS, 1, ROWS) < T.Broadcast(rows, ROWS),
                shape.sees(T.Ramp(part * ROWS, 1, ROWS), position, newest),
            )
        )
        # 1 where a row is seen. T.max may lose a NaN; `unknown` remembers it.
        sums.seen[FOUR] = T.Select(seen, T.Broadcast(T.int32(1), ROWS), T.Broadcast(T.int32(0), ROWS))
        sums.unknown[FOUR] = T.max(
            sums.unknown[FOUR],
            T.Select(
                magnitude_bits(sums.logits[at], ROWS) > T.Broadcast(T.int32(INFINITY), ROWS),
                sums.seen[FOUR],
                T.Broadcast(T.int32(0), ROWS),
            ),
        )
        # NaN marks a row that is not seen, and `weigh` turns it into UNSEEN.
        sums.logits[at] = T.Select(
            sums.seen[FOUR] > T.Broadcast(T.int32(0), ROWS), sums.logits[at], T.Broadcast(not_a_number(), ROWS)
        )
        # T.max gives its second operand where the first is a NaN.
        sums.most[FOUR] = T.max(sums.logits[at], sums.most[FOUR])
    sums.stat[0] = T.max(T.max(sums.most[0], sums.most[1]), T.max(sums.most[2], sums.most[3]))
    for u in T.unroll(ROWS):
        query.unknown[0] = T.max(query.unknown[0], sums.unknown[u])


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


@script.kernel
def exact_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    window: tuple[int, int] | None = None,
    positions: int = 1,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return attention of query rows [B, Hq, T, D] to the int8 rows [V, Hkv, S, .] that they see: float32 as query.

    `window` is (sinks, window) of a ring cache; None: all rows up to the query's. Parallel over heads and query rows.
    """
    read = read_knots(isa)
    b, hq, t, d = query
    videos, hkv, s, _ = cache
    share = b // videos
    shape = ExactShape(d, s, window, float(exact.logit_factor(scale)), isa)
    n, size, knots = shape.blocks, d + shape.blocks, exact.EXP_KNOTS + 1
    items = b * hq * t
    loop = T.parallel if items > 1 and items * s * d >= PARALLEL_CACHE_ELEMENTS else T.serial

    @script.prim_func(private=True, s_tir=True)
    def attend_exact(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((videos, hkv, s, size), "int8"),
        values: T.Buffer((videos, hkv, s, size), "int8"),
        position: T.Buffer((positions,), "int64"),
        table: T.Buffer((knots,), "int32"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        for item in loop(items):
            with T.sblock("row"):
                script.access([q, keys, values, position, table], [y])
                sums = row_buffers(shape)
                # The query as a wide block, and 1 in `unknown` where it holds a NaN.
                own = script.temporaries(mantissas=(d, "int16"), exponents=(n, "int32"), unknown=(1, "int32"))
                bi: T.let = item // (hq * t)
                head: T.let = item // t % hq
                i: T.let = item % t
                last: T.let = T.Cast("int32", number_of(position, bi))
                first: T.let = T.max(last, 0)
                place: T.let = first + i
                newest: T.let = first + t - 1
                # A ring holds rows of any age, so all rows up to the newest one are scanned and `sees` decides.
                rows: T.let = T.min((place if window is None else newest) + 1, s)
                # at: batch row, query head, key/value head, query row, row set of the cache.
                at = T.meta_var((bi, head, head // (hq // hkv), i, bi // share))
                o = script.temporaries(q=q, keys=keys, values=values, position=position, table=table, at=at)
                _round_query(shape, o, own)
                _multiply_keys(shape, o, own, sums, rows, place, newest)
                weigh(read, o, sums, rows)
                add_values(shape, o, sums, rows)
                sums.stat[1] = T.float32(1) / (T.Cast("float32", sums.count[0]) * T.float32(2.0**-exact.EXP_BITS))
                # A maximum that is not finite makes the whole row NaN.
                if magnitude_bits(sums.stat[0], 1) >= T.int32(INFINITY):
                    own.unknown[0] = 1
                # A NaN in a block of values makes the 32 columns of that block NaN, no others. A row that is not there
                # has position -1, and is zero.
                for c in range(d):
                    y[bi, head, i, c] = T.Select(
                        last < 0,
                        T.float32(0),
                        T.Select(
                            own.unknown[0] + sums.columns[c // BLOCK] > 0, not_a_number(), sums.out[c] * sums.stat[1]
                        ),
                    )

    return attend_exact
