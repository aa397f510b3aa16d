"""The Temporal Attention Score in integers (docs/reference/numerics.md, "TAS, bit for bit")."""

from __future__ import annotations

import struct

TAS_FRACTION_BITS = 24
"""Products of a Temporal Attention Score are summed as integers of 2^-24."""

TAS_LIMIT = 1 << 46
"""One product counts as at most this many of them (2^22 = 4.2 million): 65,536 products fit int64."""


def score_factor(scale: float, heads: int) -> float:
    """Return what the integer sum over all query heads is multiplied with: scale / heads / 2^24, as float32."""
    return struct.unpack("<f", struct.pack("<f", scale / heads / (1 << TAS_FRACTION_BITS)))[0]
