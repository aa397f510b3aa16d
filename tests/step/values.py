"""Values that the tests of the decode step share."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SPECIAL_BITS = (
    *(0x00000000, 0x80000000, 0x00800000, 0x80800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000),
    *(0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F7E0000, 0x7F7F0000, 0x427F0000, 0x427EFFFF, 0x42FE8000, 0x00000001),
)
"""Zeros, limits of the format, what is not finite, and values at which the exponent of a block changes."""


def random_row(rng: np.random.Generator, *shape: int, hostile: bool) -> Array:
    """float32 values of all magnitudes, half of them with special ones among them."""
    values = (rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, shape)).astype(np.float32)
    if not hostile:
        return values
    special = rng.choice(np.array(SPECIAL_BITS, np.uint32), shape).view(np.float32)
    bits = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    kind = rng.integers(0, 8, shape)
    return np.where(kind == 0, special, np.where(kind == 1, bits, values)).astype(np.float32)


def assert_same(got: Array, want: Array) -> None:
    """Equal as bit patterns, but that a NaN is any NaN."""
    assert got.dtype == want.dtype == np.float32
    both = np.isnan(got) & np.isnan(want)
    np.testing.assert_array_equal(np.where(both, 0, got.view(np.uint32)), np.where(both, 0, want.view(np.uint32)))
