"""Logits of a query and keys of an int8 cache, from integer products.

The query is rounded to 21 bits of the largest magnitude of each block of 32 elements and split in three digits, whose
products with mantissas are exact in int32: a logit is off by some 2^-21 of the products that it sums, where rounding
the keys to int8 has moved it by 2^-8 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.attention.limbs import (
    BYTES,
    DIGITS,
    LANES,
    LEAST,
    dot,
    lanes_of,
    powers_of,
    raised,
    rows_from,
    unit,
)
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import KEYS, LOWEST
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd import vectors
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, Expr, folded, interleaved, magnitudes, prefetch, pure
from fastcar_compile.ops.cached import BLOCK as SHARING

LOW_BITS = 5
"""Of a query's integer, below its two digits of 8 bits."""

LARGEST = 127 << 8 + LOW_BITS
"""Of a query's integer: its products with 16 mantissas, which end in one lane, add up to less than 2^31."""

_BLOCK_OF_LANE = [0] * (LANES // 2) + [1] * (LANES // 2)


@dataclass(frozen=True)
class Query:
    """Buffers of a split query, `chunks` vectors of 64 elements for each of `group` heads.

    Attributes:
        digits: int8 [group * 3 * d]: most significant first. scales: float32 [group * chunks * 16], what a lane's
            sum is multiplied by. excess: int32, alike: what flipping the mantissas' top bits adds to a lane's sum.
    """

    digits: Any
    scales: Any
    excess: Any


@dataclass(frozen=True)
class Sums:
    """Temporaries: int32 of 4, 2 vectors; float32 of a vector, and of 4."""

    rows: Any
    pairs: Any
    logit: Any
    top: Any


def _high(q: Expr) -> Expr:
    return T.shift_right(q + T.int32(1 << 7 + LOW_BITS), T.int32(8 + LOW_BITS))


def _middle(q: Expr) -> Expr:
    return T.shift_right(q - T.shift_left(_high(q), T.int32(8 + LOW_BITS)), T.int32(LOW_BITS))


def _low(q: Expr) -> Expr:
    return T.bitwise_and(q, T.int32((1 << LOW_BITS) - 1))


def _flipped(mantissas: Expr) -> Expr:
    """Plus 128, as unsigned bytes."""
    return T.bitwise_xor(mantissas, T.Broadcast(T.int8(-128), BYTES))


def _products(unsigned: Expr, digits: Any, start: Expr, d: int) -> Expr:
    """Per lane those of four bytes and the query's integers, whose digits are from `start` on; exact modulo 2^32."""
    high, middle, low = (digits[T.Ramp(start + k * d, 1, BYTES)] for k in range(DIGITS))
    total = dot(T.Broadcast(0, LANES), unsigned, high)
    return dot(raised(dot(raised(total, 8), unsigned, middle), LOW_BITS), unsigned, low)


def _of_four(pairs: Any) -> Expr:
    """In every four lanes, the sums of these lanes of four rows."""
    return interleaved(lanes_of(pairs, 0), lanes_of(pairs, 1), LANES, 2)


@inlined
def _pair_up(rows, pairs):
    """Four vectors become two, of runs of one lane of each."""
    for p in T.unroll(2):
        pairs[T.Ramp(p * LANES, 1, LANES)] = interleaved(lanes_of(rows, 2 * p), lanes_of(rows, 2 * p + 1), LANES, 1)


def split_macro(d: int, group: int, scale: float) -> Callable[..., None]:
    """(q, batch row, kv head, i, query, sums, whole): the head's query rows i, split; `whole` is int32 [32]."""
    blocks, chunks = d // SHARING, d // BYTES

    @inlined
    def split(q, bi, h, i, query, sums, whole):
        for g in range(group):
            for e in range(blocks):
                sums.top[0] = T.reinterpret(
                    "float32",
                    pure(
                        "int32",
                        f"llvm.vector.reduce.smax.v{SHARING}i32",
                        magnitudes(q[bi, h * group + g, i, T.Ramp(e * SHARING, 1, SHARING)], SHARING),
                    ),
                )
                sums.top[1] = T.float32(LARGEST) / T.max(T.float32(LEAST), sums.top[0])
                for v in T.vectorized(SHARING):
                    whole[v] = T.Cast("int32", T.nearbyint(q[bi, h * group + g, i, e * SHARING + v] * sums.top[1]))
                for v in T.vectorized(SHARING):
                    query.digits[g * DIGITS * d + e * SHARING + v] = T.Cast("int8", _high(whole[v]))
                for v in T.vectorized(SHARING):
                    query.digits[(g * DIGITS + 1) * d + e * SHARING + v] = T.Cast("int8", _middle(whole[v]))
                for v in T.vectorized(SHARING):
                    query.digits[(g * DIGITS + 2) * d + e * SHARING + v] = T.Cast("int8", _low(whole[v]))
                for v in T.vectorized(LANES // 2):
                    query.scales[(g * blocks + e) * (LANES // 2) + v] = unit(sums.top[0], LARGEST) * T.float32(scale)
            for c in T.unroll(chunks):
                for r in T.unroll(KEYS):
                    sums.rows[T.Ramp(r * LANES, 1, LANES)] = _products(
                        T.Broadcast(T.int8(-128), BYTES), query.digits, g * DIGITS * d + c * BYTES, d
                    )
                _pair_up(sums.rows, sums.pairs)
                query.excess[T.Ramp((g * chunks + c) * LANES, 1, LANES)] = _of_four(sums.pairs)

    return split


def logits_macro(d: int) -> Callable[..., None]:
    """(keys, batch row, kv head, g, at, last, count, row, ask, query, sums, weights): weights[0 .. count - 1] become
    the logits of head g of the group and the rows from row(at) on, top their maximum in four parts."""
    chunks, lines = d // BYTES, -(-KEYS * (d + d // SHARING) // LINE)
    order = [2 * (lane % KEYS) + _BLOCK_OF_LANE[lane] for lane in range(LANES)]

    @inlined
    def logits(keys, bi, h, g, at, last, count, row, ask, query, sums, weights):
        sums.top[T.Ramp(0, 1, 4)] = T.Broadcast(T.float32(LOWEST), 4)
        for part in range((count + KEYS - 1) // KEYS):
            if ask is not None and g == 0:
                for line in T.unroll(lines):
                    T.evaluate(prefetch(keys[bi, h, ask(at + part * KEYS), line * LINE]))
            sums.logit[T.Ramp(0, 1, LANES)] = T.Broadcast(T.float32(0), LANES)
            for c in T.unroll(chunks):
                for r in T.unroll(KEYS):
                    sums.rows[T.Ramp(r * LANES, 1, LANES)] = _products(
                        _flipped(keys[bi, h, row(T.min(at + part * KEYS + r, last - 1)), T.Ramp(c * BYTES, 1, BYTES)]),
                        query.digits,
                        g * DIGITS * d + c * BYTES,
                        d,
                    )
                _pair_up(sums.rows, sums.pairs)
                sums.logit[T.Ramp(0, 1, LANES)] = lanes_of(sums.logit, 0) + T.Cast(
                    f"float32x{LANES}", _of_four(sums.pairs) - lanes_of(query.excess, g * chunks + c)
                ) * (
                    powers_of(keys, rows_from(row, (bi, h), at + part * KEYS, last, KEYS), d + 2 * c, 2, order)
                    * lanes_of(query.scales, g * chunks + c)
                )
            weights[T.Ramp(part * KEYS, 1, KEYS)] = folded(vectors.row(sums.logit, [], 0), LANES)
            sums.top[T.Ramp(0, 1, 4)] = T.max(weights[T.Ramp(part * KEYS, 1, KEYS)], sums.top[T.Ramp(0, 1, 4)])

    return logits
