"""Logits of a query and the keys of an int8 cache, from integer products.

The query is rounded to 21 bits of the largest magnitude of each block of 32 elements and split into three limbs. The
products of the limbs with mantissas are exact in int32. So a logit is off by about 2^-21 of the products that it sums,
where rounding the keys to int8 has moved it by 2^-8 of them.
"""

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.attention.softmax import LOWEST, PARALLEL_KEYS, prefetch_rows
from fastcar_compile.codegen.tvm.kernels.cache import power_of_two, row_at
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, load_from, ramp, vector, vpdpbusd
from fastcar_compile.ir.ops.operator import BLOCK as EXPONENT_BLOCK

# Integers in limbs of a byte, for products with the mantissas of an int8 cache on AVX-512 VNNI.
#
# vpdpbusd multiplies bytes, so a 21 or 24 bit integer takes three products, one per limb. A vector holds 64
# mantissas, which are two blocks of a row, and its sums are 16 int32.


VECTOR_BYTES = 64
SUMS = VECTOR_BYTES // 4
"""int32 sums of a vector."""

LIMBS = 3
"""Limbs of a query's element, and of a weight."""

SMALLEST = 1e-30
"""A smaller maximum is taken for this one. Its inverse stays finite, and what is lost is below it."""


def shift_sums(acc: Expr, bits: int) -> Expr:
    """Return a vector of sums times 2^bits."""
    return T.shift_left(acc, T.Broadcast(T.int32(bits), SUMS))


def unit(largest: Expr, count: float) -> Expr:
    """Return largest / count, NaN where the largest is a NaN or infinite."""
    # largest - largest is 0, or NaN for a NaN and for infinity.
    return largest * T.float32(1 / count) + (largest - largest)


def two_halves(a: Expr, b: Expr, lanes: int) -> Expr:
    """Return a vector of two scalars: a in the lower half, b in the upper half."""
    return T.Shuffle([T.Broadcast(a, lanes // 2), T.Broadcast(b, lanes // 2)], list(range(lanes)))


def block_scales(cache: Any, rows: Sequence[Any], start: Expr, count: int, order: Sequence[int]) -> Expr:
    """Return 2^exponent of `count` exponents per row from element `start` on. `order` numbers them row by row."""
    # One load brings all exponents of a row, and the shuffle puts them in the order of the lanes.
    loads = [cache[(*row, T.Ramp(start, 1, count))] for row in rows]
    # A TVM shuffle has at most as many lanes as its operands together, so the loads are repeated.
    exponents = T.Shuffle(loads * -(-len(order) // (count * len(loads))), list(order))
    return power_of_two(T.Cast(f"int32x{len(order)}", exponents), len(order))


LOW_BITS = 5
"""Bits of a query's integer below its two limbs of 8 bits."""

LARGEST = 127 << 8 + LOW_BITS
"""The largest integer of a query. Its products with 16 mantissas, which end in one lane, add up to less than 2^31."""

_BLOCKS_OF_KEYS = [2 * (lane % PARALLEL_KEYS) + lane // (SUMS // 2) for lane in range(SUMS)]
"""Lane i belongs to key i % 4. Lanes 0 to 7 are the first exponent block of the vector, 8 to 15 the second."""


def split_query_buffers(d: int, group: int) -> Any:
    """Allocate the split query of `group` heads, each of D / 64 vectors of 64 elements."""
    lanes = group * d // VECTOR_BYTES * SUMS
    return script.temporaries(
        # The limbs, most significant first; what a lane's sum is multiplied by.
        limbs=(group * LIMBS * d, "int8"),
        scales=(lanes, "float32"),
        # The zero-point correction of a lane's sum, for mantissas whose sign bit is flipped.
        correction=(lanes, "int32"),
    )


def logit_buffers() -> Any:
    """Allocate the integer sums of four keys with the query, their pairs, the logits, and m of four parts."""
    return script.temporaries(
        keys=(PARALLEL_KEYS * SUMS, "int32"),
        pairs=(2 * SUMS, "int32"),
        logits=(SUMS, "float32"),
        m=(PARALLEL_KEYS, "float32"),
    )


def _high(q: Expr) -> Expr:
    # Rounding to nearest leaves a rest of at most 2^12 on either side, so the middle limb is a signed byte.
    return T.shift_right(q + T.int32(1 << 7 + LOW_BITS), T.int32(8 + LOW_BITS))


def _middle(q: Expr) -> Expr:
    # The rest without its lowest LOW_BITS is a signed byte.
    return T.shift_right(q - T.shift_left(_high(q), T.int32(8 + LOW_BITS)), T.int32(LOW_BITS))


def _low(q: Expr) -> Expr:
    # The lowest limb has no sign: 0 to 31 is a valid int8.
    return T.bitwise_and(q, T.int32((1 << LOW_BITS) - 1))


def _products(unsigned: Expr, limbs: Any, start: Expr, d: int) -> Expr:
    """Return per lane the sum of four bytes times the query's integers, whose limbs begin at `start`, modulo 2^32."""
    # Horner's rule in one accumulator: the sum of a limb is shifted before the products of the next one.
    high, middle, low = (limbs[T.Ramp(start + k * d, 1, VECTOR_BYTES)] for k in range(LIMBS))
    # Sums may wrap modulo 2^32. After the zero-point correction they fit int32, so the wrap cancels.
    total = vpdpbusd(T.Broadcast(0, SUMS), unsigned, high, VECTOR_BYTES)
    total = vpdpbusd(shift_sums(total, 8), unsigned, middle, VECTOR_BYTES)
    return vpdpbusd(shift_sums(total, LOW_BITS), unsigned, low, VECTOR_BYTES)


def _of_four(pairs: Any) -> Expr:
    """Return, in every four lanes, the sums of these lanes of four keys."""
    return vectors.interleave_add(pairs[vector(0, SUMS)], pairs[vector(1, SUMS)], SUMS, 2)


@script.inlined
def _pair_up(keys, pairs):
    """Interleave the sums of four keys to two vectors, in runs of one lane."""
    for p in T.unroll(2):
        pairs[T.Ramp(p * SUMS, 1, SUMS)] = vectors.interleave_add(
            keys[vector(2 * p, SUMS)], keys[vector(2 * p + 1, SUMS)], SUMS, 1
        )


@script.inlined
def _write_limb(d, query, integers, g, e, limb, k):
    for v in T.vectorized(EXPONENT_BLOCK):
        query.limbs[(g * LIMBS + k) * d + e * EXPONENT_BLOCK + v] = T.Cast("int8", limb(integers[v]))


@script.inlined
def _split_block(d, scale, row, g, e, query, sums, integers):
    # Bits of magnitudes compare as integers: one reduction gives the maximum of 32 elements.
    sums.m[0] = T.reinterpret(
        "float32",
        vectors.intrinsic(
            "int32",
            f"llvm.vector.reduce.smax.v{EXPONENT_BLOCK}i32",
            vectors.magnitude_bits(row(ramp(e * EXPONENT_BLOCK, EXPONENT_BLOCK)), EXPONENT_BLOCK),
        ),
    )
    # SMALLEST keeps the quotient finite for a block of zeros.
    sums.m[1] = T.float32(LARGEST) / T.max(T.float32(SMALLEST), sums.m[0])
    for v in T.vectorized(EXPONENT_BLOCK):
        integers[v] = T.Cast("int32", T.nearbyint(row(e * EXPONENT_BLOCK + v) * sums.m[1]))
    # Limbs are three planes of D bytes, so one load takes 64 elements of one limb.
    script.each(_write_limb, (_high, _middle, _low), d, query, integers, g, e)
    # A block of 32 mantissas has 8 of the 16 lanes, because vpdpbusd adds four bytes per lane.
    for v in T.vectorized(SUMS // 2):
        query.scales[(g * (d // EXPONENT_BLOCK) + e) * (SUMS // 2) + v] = unit(sums.m[0], LARGEST) * T.float32(scale)


@script.inlined
def split_query(d, group, scale, o, heads, query, sums, integers):
    """Split the query rows of a group of heads of d elements. The temporary integers is int32 [32]."""
    for g in range(group):
        for e in range(d // EXPONENT_BLOCK):
            _split_block(d, scale, row_at(o.q, heads.b, heads.first + g, heads.i), g, e, query, sums, integers)
        # The correction is the product with zero mantissas, in the lanes in which `multiply_keys` has its sums.
        # A zero mantissa is the unsigned byte 128, whose bits are int8 -128.
        for c in T.unroll(d // VECTOR_BYTES):
            # All four keys get the same product, so the shuffles put it in every key's lanes.
            for r in T.unroll(PARALLEL_KEYS):
                sums.keys[T.Ramp(r * SUMS, 1, SUMS)] = _products(
                    T.Broadcast(T.int8(-128), VECTOR_BYTES), query.limbs, g * LIMBS * d + c * VECTOR_BYTES, d
                )
            _pair_up(sums.keys, sums.pairs)
            query.correction[T.Ramp((g * (d // VECTOR_BYTES) + c) * SUMS, 1, SUMS)] = _of_four(sums.pairs)


@script.inlined
def _add_vector(d, o, step, part, c, query, sums):
    # r: unrolled, four keys. Their sums are in registers, and so is the vector of four logits in four parts.
    # vpdpbusd takes an unsigned and a signed factor: mantissas plus 128 are the unsigned one.
    for r in T.unroll(PARALLEL_KEYS):
        sums.keys[T.Ramp(r * SUMS, 1, SUMS)] = _products(
            vectors.flip_sign(
                o.keys[(*step.clamped(part * PARALLEL_KEYS + r), T.Ramp(c * VECTOR_BYTES, 1, VECTOR_BYTES))],
                VECTOR_BYTES,
            ),
            query.limbs,
            step.g * LIMBS * d + c * VECTOR_BYTES,
            d,
        )
    # Two rounds of interleaving: lane i of every four lanes is a part of key i's sum.
    _pair_up(sums.keys, sums.pairs)
    at = T.meta_var(vector(step.g * (d // VECTOR_BYTES) + c, SUMS))
    # The difference is exact in int32. Then every lane is scaled by its key's exponent and the query's unit.
    sums.logits[vector(0, SUMS)] = sums.logits[vector(0, SUMS)] + T.Cast(
        f"float32x{SUMS}", _of_four(sums.pairs) - query.correction[at]
    ) * (block_scales(o.keys, step.four_rows(part), d + 2 * c, 2, _BLOCKS_OF_KEYS) * query.scales[at])


@script.inlined
def multiply_keys(rows_of, o, step, query, sums, weights):
    """Write a block's logits to weights, and their maximum, in four parts, to sums.m."""
    sums.m[ramp(0, 4)] = T.Broadcast(T.float32(LOWEST), 4)
    # part: four keys. c: unrolled, 64 elements. The 16 partial logits stay in a register.
    for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
        # Four rows are adjacent in the cache: their lines are one run.
        prefetch_rows(rows_of, PARALLEL_KEYS, o.keys, step, part * PARALLEL_KEYS, 0)
        sums.logits[vector(0, SUMS)] = T.Broadcast(T.float32(0), SUMS)
        for c in T.unroll(rows_of.dim // VECTOR_BYTES):
            _add_vector(rows_of.dim, o, step, part, c, query, sums)
        # Lanes that are equal modulo four belong to one key. The four groups are added in ascending order.
        weights[T.Ramp(part * PARALLEL_KEYS, 1, PARALLEL_KEYS)] = vectors.fold_fours(
            load_from(sums.logits, [], 0), SUMS
        )
        # Rows past the last are copies of it, so the maximum is that of the block's rows.
        sums.m[ramp(0, 4)] = T.max(weights[T.Ramp(part * PARALLEL_KEYS, 1, PARALLEL_KEYS)], sums.m[ramp(0, 4)])
