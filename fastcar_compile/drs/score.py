"""Constants of the scores, and the factors that turn their integer sums into scores (docs/reference/numerics.md)."""

from __future__ import annotations

import struct

TAS_FRACTION_BITS = 24
"""Products of a Temporal Attention Score are summed as integers of 2^-24."""

TAS_LIMIT = 1 << 46
"""One product counts as at most this many of them (2^22 = 4.2 million): 65,536 products fit int64."""

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
    """Return what the integer sum over all query heads is multiplied with: scale / heads / 2^24, as float32."""
    return float32(scale / heads / (1 << TAS_FRACTION_BITS))


def distance_factor(heads: int) -> float:
    """Return what the integer sum over query heads of 1 - cosine is multiplied with: 1 / heads / 2^30, as float32."""
    return float32(1 / heads / (1 << COSINE_BITS))
