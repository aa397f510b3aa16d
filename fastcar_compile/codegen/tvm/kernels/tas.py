"""The temporal attention score (TAS), over all heads and over chosen ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.cache import Row, RowFormat, number_of, row_at
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, Expr, broadcast, cast, prefetch, ramp, vector_type
from fastcar_compile.gates.scores import TAS_FRACTION_BITS, TAS_LIMIT, score_factor

ROUNDER = 1.5 * 2.0**52
"""A float64 of at most 2^51 plus this has the nearest integer, half to even, in its low bits. AVX2 has no conversion of
float64 to int64, and this takes one addition where there is one too."""

ROUNDER_BITS = 0x4338000000000000
"""The bits of ROUNDER."""

NOT_A_NUMBER = 0x7FC00000
"""The bits of the NaN that a row has which is not finite."""

INFINITY = 0x7F800000
"""The bits of infinity: magnitude bits from here on are not finite."""


def rounded(x: Expr, lanes: int) -> Expr:
    """Return float64 of magnitude at most 2^51 as int64, rounded half to even."""
    # From 2^52 to 2^53 the last place of a float64 is 1, so the addition itself rounds to an integer.
    # The factor 1.5 keeps the sum in that range for a negative x too.
    bits = T.reinterpret(vector_type("int64", lanes), x + broadcast(T.float64(ROUNDER), lanes))
    return bits - broadcast(T.int64(ROUNDER_BITS), lanes)


def units(a: Expr, lanes: int) -> Expr:
    """Return float32 in units of 2^-24, exactly, as float64."""
    return cast("float64", a, lanes) * broadcast(T.float64(1 << TAS_FRACTION_BITS), lanes)


def limited(product: Expr, lanes: int) -> Expr:
    """Return a float64 in units of 2^-24 as int64, rounded half to even and limited to 2^46."""
    # 2^46 is below the 2^51 that `rounded` takes.
    # T.min gives its second operand for a NaN, so a NaN becomes the limit. The callers make such a score NaN.
    limit = broadcast(T.float64(TAS_LIMIT), lanes)
    return rounded(T.max(T.min(product, limit), -limit), lanes)


def fixed_magnitude(a: Expr, lanes: int) -> Expr:
    """Return a float32 that is not negative in units of 2^-24 as int64, rounded half to even and limited to 2^46."""
    # The product with 2^24 is exact. An overflow gives infinity, which the limit takes.
    own = a * broadcast(T.float32(1 << TAS_FRACTION_BITS), lanes)
    return rounded(cast("float64", T.min(own, broadcast(T.float32(TAS_LIMIT), lanes)), lanes), lanes)


def finite_or_nan(largest: Expr, score: Expr) -> Expr:
    """Return the score, or NaN where the largest magnitude bits are not finite."""
    return T.Select(largest < T.int32(INFINITY), score, T.reinterpret("float32", T.int32(NOT_A_NUMBER)))


PARALLEL_ROWS = 8
"""Rows from which a second thread pays for launching and awaiting a parallel region: 2.7 µs."""


def _fixed_point(x: Expr, lanes: int) -> Expr:
    """Return float64 in units of the score as int64, within the limits. A NaN or an infinity gives the lower limit."""
    limit = T.float64(TAS_LIMIT)
    bounded = T.max(T.min(x, limit), -limit)
    # A comparison with a NaN is false, so a NaN takes the lower limit too.
    return rounded(T.Select(T.max(x, -x) < T.infinity("float64"), bounded, broadcast(-limit, lanes)), lanes)


@dataclass(frozen=True)
class _Heads:
    """Shapes of `tas`, and how a head's products are summed."""

    query: HeadShape
    cache: HeadShape
    dtype: str
    positions: int
    isa: InstructionSet

    @property
    def keys_of(self) -> RowFormat:
        """The rows of the cache."""
        return RowFormat(self.query[3], self.dtype, self.isa)

    @property
    def share(self) -> int:
        """Rows of the query for each row set of the cache."""
        return self.query[0] // self.cache[0]

    @property
    def lanes(self) -> int:
        """Products of one vector."""
        return next(v for v in (8, 4, 2, 1) if self.query[3] % v == 0)


@script.inlined
def _prefetch_keys(heads, keys, i, before):
    """Prefetch the keys of a row. Keys of heads are in as many pages: the waits for them overlap."""
    # h: key/value heads. u: unrolled, the cache lines of one key, which need not begin with a line.
    for h in range(heads.cache[1]):
        for u in T.unroll(-(-heads.keys_of.bytes // LINE) + 1):
            T.evaluate(prefetch(keys[i // heads.share, h, before, u * heads.keys_of.elements_of(LINE)]))


@script.inlined
def _add_head(keys_of, lanes, query, key, acc, product):
    """Add the products of a head; query: an element by its number."""
    # c: vectors of the head. v: one vector.
    for c in range(keys_of.dim // lanes):
        # The product of two float32 is exact in float64, and so is its scaling by 2^24.
        for v in T.vectorized(lanes):
            product[v] = (
                T.Cast("float64", query(c * lanes + v))
                * T.Cast("float64", keys_of.element(key, c * lanes, v))
                * T.float64(float(1 << TAS_FRACTION_BITS))
            )
        # product goes through a buffer, because `_fixed_point` reads it three times.
        acc[ramp(0, lanes)] = acc[ramp(0, lanes)] + _fixed_point(product[ramp(0, lanes)], lanes)


@script.inlined
def _sum_heads(heads, lanes, query, keys, i, before, acc, product):
    """Write the sum of row i over all heads to acc[0]; query: from (row, head) to the elements of a query head."""
    for v in T.vectorized(lanes):
        acc[v] = T.int64(0)
    # All keys are prefetched before the first product waits for one.
    _prefetch_keys(heads, keys, i, before)
    # h: query heads, `group` of them on one key. acc and product are one vector each, in registers.
    for h in range(heads.query[1]):
        key = T.meta_var(row_at(keys, i // heads.share, h // (heads.query[1] // heads.cache[1]), before))
        _add_head(heads.keys_of, lanes, query(i, h), key, acc, product)
    # int64 sums are exact, so the order of the lanes is free.
    for v in T.unroll(lanes - 1):
        acc[0] += acc[v + 1]


@script.inlined
def _scores(heads, stride, factor, reads, query, keys, position, y):
    """Write factor * the sum of row i at position - stride to y[i]."""
    # Parallel where a second thread pays. A row takes about 1 µs.
    loop = T.meta_var(T.parallel if heads.query[0] >= PARALLEL_ROWS else T.serial)
    for i in loop(heads.query[0]):
        with T.sblock("row"):
            script.access(reads, [y])
            acc = T.alloc_buffer((heads.lanes,), "int64")
            product = T.alloc_buffer((heads.lanes,), "float64")
            # Row `position - stride` is the same place of the frame before.
            before: T.let = T.max(T.Cast("int32", number_of(position, i)) - stride, 0)
            _sum_heads(heads, heads.lanes, query, keys, i, before, acc, product)
            y[i] = T.Cast("float32", acc[0]) * T.float32(factor)


@script.kernel
def tas(
    query: HeadShape,
    cache: HeadShape,
    stride: int,
    scale: float,
    dtype: str = "float32",
    positions: int = 1,
    isa: InstructionSet = PORTABLE,
    weighted: bool = False,
) -> PrimFunc:
    """Return the mean over heads of scale * <query, key at position - stride>: float32 [B].

    query float32 [B, Hq, T, D], of which row 0 counts, keys [V, Hkv, S, D] of `dtype`. Where `weighted` the kernel
    takes a weight per query head, 0 for one that is not chosen, and gives the sum of scale * <weight * query, key>.
    Bit for bit as the operators: each product is rounded to fixed point, and integer sums are exact in any order.
    """
    heads, factor = _Heads(query, cache, dtype, positions, isa), score_factor(scale, 1 if weighted else query[1])
    (b, hq, t, d), (videos, hkv, s, _), width = query, cache, heads.keys_of.size

    @script.prim_func(private=True, s_tir=True)
    def temporal_score(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((videos, hkv, s, width), dtype),
        position: T.Buffer((positions,), "int64"),
        weight: T.Buffer((hq,), "float32"),
        y: T.Buffer((b,), "float32"),
    ):
        elements = T.meta_var(_weighted(q, weight) if weighted else _queries(q))
        reads = T.meta_var([q, keys, position, weight] if weighted else [q, keys, position])
        _scores(heads, stride, factor, reads, elements, keys, position, y)

    return temporal_score if weighted else script.without(temporal_score, 3)


def _queries(q: Any) -> Callable[[Expr, Expr], Row]:
    """Return the elements of a query head, by row and head."""
    return lambda i, h: row_at(q, i, h, 0)


def _weighted(q: Any, weight: Any) -> Callable[[Expr, Expr], Row]:
    """Return the elements of a query head times its weight, in float32, by row and head."""
    return lambda i, h: lambda c: q[i, h, 0, c] * weight[h]
