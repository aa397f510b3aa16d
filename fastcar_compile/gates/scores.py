"""Constants of the scores, which every backend has, and fixed-point products in numpy (docs/reference/numerics.md)."""

import struct

import numpy as np

from fastcar_compile.gates.base import Array

TAS_FRACTION_BITS = 24
"""Products of a Temporal Attention Score are summed as integers of 2^-24."""

TAS_LIMIT = 1 << 46
"""One product counts as at most this many units (2^22 = 4.2 million): 65,536 products fit int64."""

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
