"""Sums of products in fixed point: integers of 2^-24, whose sum has no order."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.drs.score import TAS_FRACTION_BITS, TAS_LIMIT


def fixed_sum(products: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the int64 sum over `dims` of float64 products of two float32, in units of 2^-24.

    Each product is exact (24 by 24 bits fit the 53 of a float64), then rounded half to even and limited to 2^46 units.
    One that is not finite counts as -2^46. At most 65,536 of them fit int64.
    """
    # A power of two: the scaling is exact, or infinite and then counted as the least value.
    units = products * (1 << TAS_FRACTION_BITS)
    limited = units.round().clamp(-TAS_LIMIT, TAS_LIMIT)
    return torch.where(units.isfinite(), limited, -TAS_LIMIT).to(torch.int64).sum(dims)
