"""Scores of every gate of the fabric but `tas` in numpy (docs/reference/numerics.md, "Scores, bit for bit").

Every backend has the same constants. The functions add Python or int64 integers, so they share no arithmetic with
the backends that they check.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Constants of the scores, and the factors that turn their integer sums into scores (docs/reference/numerics.md).


TAS_FRACTION_BITS = 24
"""Products of a Temporal Attention Score are summed as integers of 2^-24."""

TAS_LIMIT = 1 << 46
"""One product counts as at most this many units (2^22 = 4.2 million): 65,536 products fit int64."""

COSINE_BITS = 30
"""Cosines of query heads are averaged as integers of 2^-30."""

HASH_PRIME = 2**31 - 1
HASH_FACTORS = (48271, 69621, 16807)
HASH_ROUNDS = (1_234_567, 89_012_345, 678_901_234)
HASH_BITS = 24
"""x -> x**5 is a permutation modulo this prime. A product of two residues fits int64, which every backend has."""


def float32(value: float) -> float:
    """Return the value rounded to float32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def score_factor(scale: float, heads: int) -> float:
    """Return the factor of the integer sum over all query heads: scale / heads / 2^24, as float32."""
    return float32(scale / heads / (1 << TAS_FRACTION_BITS))


def distance_factor(heads: int) -> float:
    """Return the factor of the integer sum over query heads of 1 - cosine: 1 / heads / 2^30, as float32."""
    return float32(1 / heads / (1 << COSINE_BITS))


Array = NDArray[Any]

MAX_TERMS = 65536
"""Terms of one sum: this number of values of at most TAS_LIMIT fits int64."""

FEATURE_BITS = 22
"""The features of a row are integers of at most 2^22 in magnitude, with one exponent for all of them."""

WEIGHT_BITS = 31
"""The magnitudes of a unit's weights sum to at most 2^31, in units of the unit's lowest bit. So its sum has 53 bits."""

LEAST_EXPONENT = 22
"""Least exponent field of a row of features. No power of two that scales features or sums is subnormal then."""

SCALE_FIELD = 126 + FEATURE_BITS
"""A feature is multiplied by 2^(SCALE_FIELD - exponent field) before it is rounded."""

MANTISSA_BITS = 23
"""Stored bits of a float32's mantissa."""


def fixed_products(a: Array, b: Array) -> Array:
    """Return a * b of float32 in units of 2^-24, rounded half to even and limited, int64; -2^46 where not finite."""
    # Two 24-bit mantissas multiply exactly in float64, and a power of two moves only the exponent: `rint` rounds once.
    with np.errstate(invalid="ignore", over="ignore"):
        products = a.astype(np.float64) * b.astype(np.float64) * (1 << TAS_FRACTION_BITS)
        limited = np.clip(np.rint(products), -TAS_LIMIT, TAS_LIMIT)
    return np.where(np.isfinite(products), limited, -TAS_LIMIT).astype(np.int64)


def input_delta(x: Array, cached: Array) -> Array:
    """Return the relative change of float32 [B, H], float32 [B]."""
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.abs(x - cached)
    # A product with 1 turns a float32 into the same fixed-point units that all other sums have.
    one = np.ones((), np.float32)
    sums = [fixed_products(np.abs(v), one).sum(-1).astype(np.float32) for v in (change, x)]
    # The divisor is at least 1, so an input of zeros cannot divide by zero.
    return np.where(np.isfinite(change).all(-1), sums[0] / np.maximum(sums[1], one), np.float32(np.nan))


class Distance(NamedTuple):
    """Factors of the distance of q and key, and of the integer sum of 1 - cosine before its root."""

    weight: float
    factor: float


def output_bound(x: Array, cached: Array, query: Array, key: Array, scale: Distance) -> Array:
    """Return the input change plus weight * sqrt(1 - mean cosine), float32 [B].

    Args:
        x, cached: float32 [B, H]. query: float32 [B, Hq, D]. key: float32 [B, Hkv, D], of one frame earlier.
        scale: its factor is `distance_factor` of the heads.
    """
    rows, heads, dim = query.shape
    own = query.reshape(rows, key.shape[1], -1, dim)
    other = key[:, :, None]
    dots, squares, others = (fixed_products(*pair).sum(-1) for pair in ((own, other), (own, own), (other, other)))
    # The floor of 1 keeps a head of zeros from dividing by zero. Its cosine is then 0.
    lengths = np.sqrt(np.maximum(squares.astype(np.float32) * others.astype(np.float32), np.float32(1)))
    cosines = np.clip(dots.astype(np.float32) / lengths, np.float32(-1), np.float32(1))
    # Cosines become integers before they are averaged: the sum over heads is exact in any order.
    near = np.rint(cosines * np.float32(1 << COSINE_BITS)).astype(np.int64)
    apart = (heads * (1 << COSINE_BITS) - near.sum((1, 2))).astype(np.float32)
    distance = np.sqrt(apart * np.float32(scale.factor))
    finite = np.isfinite(query).all((1, 2)) & np.isfinite(key).all((1, 2))
    return np.where(finite, input_delta(x, cached) + np.float32(scale.weight) * distance, np.float32(np.nan))


def unit_exponents(w1: Array) -> Array:
    """Return the exponent of the lowest bit that a unit's weights have, int64 [units], for float32 [units, 2 H].

    A unit of zeros has 0.
    """
    # `frexp` gives magnitudes in [0.5, 1): times 2^24 they are whole numbers, for every float32.
    mantissas, exponents = np.frexp(w1)
    whole = np.abs(mantissas.astype(np.float64) * (1 << 24)).astype(np.int64)
    # `whole & -whole` keeps the lowest set bit alone, and log2 of a power of two is exact.
    lowest = np.log2((whole & -whole).clip(min=1)).astype(np.int64)
    places = np.where(whole != 0, exponents - 24 + lowest, np.iinfo(np.int64).max).min(-1)
    return np.where((w1 != 0).any(-1), places, 0)


def learned_score(x: Array, cached: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """Return the network's output, float32 [B]; w1 float32 [units, 2 H] with the values of bfloat16."""
    with np.errstate(invalid="ignore", over="ignore"):
        features = np.concatenate([x, np.abs(x - cached)], -1)
    return np.array([_network(row, w1, b1, w2, b2[0]) for row in features], np.float32)


def _network(features: Array, w1: Array, b1: Array, w2: Array, b2: np.float32) -> np.float32:
    """Return the score of one row of features [2 H]."""
    largest = np.abs(features).max()
    if not np.isfinite(largest):
        return np.float32(np.nan)
    # All features of a row share the largest one's exponent, as in block floating point.
    field = max(int(largest.view(np.uint32)) >> MANTISSA_BITS, LEAST_EXPONENT)
    whole = np.rint(np.ldexp(features.astype(np.float64), SCALE_FIELD - field)).astype(np.int64)
    hidden = list[np.float32]()
    for weights, place, bias in zip(w1, unit_exponents(w1).tolist(), b1, strict=True):
        units = np.ldexp(weights.astype(np.float64), -place).astype(np.int64)
        # Python integers never overflow, so this sum checks the 53-bit bound of the fabric instead of sharing it.
        total = sum(int(a) * int(b) for a, b in zip(units, whole, strict=True))
        with np.errstate(over="ignore"):
            # The sum rounds to float32 once. Both factors that follow are powers of two.
            scaled = np.float32(math.ldexp(float(np.float32(total)), place)) * np.float32(2.0 ** (field - SCALE_FIELD))
            hidden.append(max(scaled + bias, np.float32(0)))
    if not np.isfinite(hidden).all():
        return np.float32(np.nan)
    return np.float32(fixed_products(w2, np.array(hidden, np.float32)).sum()) * np.float32(2.0**-TAS_FRACTION_BITS) + b2
