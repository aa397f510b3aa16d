"""Rows of key and value caches: float32, float16, or int8 with one exponent per block (MXINT8)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.formats import KV_TYPES, kv_type

FLOAT16_MAX = 65504.0
"""A float16 cache limits magnitudes to this, infinities too."""

BLOCK = KV_TYPES["int8"].block
"""Elements of a row that share an exponent in an int8 cache (OCP Microscaling Formats, MXINT8)."""

LEAST_EXPONENT = -120
"""Least exponent. No scale, inverse or product is subnormal then, so a CPU that flushes subnormals agrees."""

INT8_MAX = 127 * 2.0**121
"""An int8 cache limits magnitudes to this, infinities too: 64 * 2^122 would overflow when it is read."""

BIAS, MANTISSA_BITS = 127, 23
"""Exponent bias and mantissa bits of a float32."""

NOT_A_NUMBER = -128
"""Exponent of a block that contains a NaN; its mantissas are 0. As a scale its bits are those of minus infinity."""

ROUNDS_UP = 1 << 16
"""Added to the bits of a float32, it carries into the exponent if the mantissa (1 to 2) is at least 127.5 / 64."""

EXCESS = BIAS + 6
"""A float32's exponent field minus the scale's exponent: a mantissa has 7 bits before the point."""


def row_size(dim: int, dtype: torch.dtype | str) -> int:
    """Return the elements of a cached row of `dim` values: those, and the exponents of its blocks behind them."""
    return kv_type(dtype).row_size(dim)


def head_dim(row: int, dtype: torch.dtype | str) -> int:
    """Return the head dimension of a cached row; the inverse of `row_size`."""
    return kv_type(dtype).head_dim(row)


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values float32 [..., D] as cached rows, [..., row_size(D, dtype)].

    float16: rounded half to even and limited to ±65504; a NaN stays a NaN. int8: D mantissas m from -127 to 127, then
        the
    exponents e of their blocks; the value is m * 2^e. e is the least exponent, from -120 on, for which every mantissa
    of the block rounds (half to even) to at most 127. Values are limited to ±127 * 2^121. A block that contains a NaN
    is all NaN. docs/reference/numerics.md defines the formats.
    """
    if dtype == torch.float16:
        return value.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(dtype)
    return _blocks(value) if dtype == torch.int8 else value


def loaded(rows: Tensor, dim: int) -> Tensor:
    """Return the exact float32 values [..., dim] of cached rows; `dim` is a head's dimension."""
    if rows.dtype != torch.int8:
        return rows.to(torch.float32)
    scales = _power_of_two(rows[..., dim:]).repeat_interleave(BLOCK, -1)
    return rows[..., :dim] * scales[..., :dim]


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, made of its bits."""
    return ((exponent.to(torch.int32) + BIAS) << MANTISSA_BITS).view(torch.float32)


def _blocks(value: Tensor) -> Tensor:
    dim = value.shape[-1]
    padded = torch.nn.functional.pad(value.clamp(-INT8_MAX, INT8_MAX), (0, -dim % BLOCK)).unflatten(-1, (-1, BLOCK))
    top = padded.abs().amax(-1)
    exponent = ((top.view(torch.int32) + ROUNDS_UP) >> MANTISSA_BITS) - EXCESS
    exponent = exponent.clamp(min=LEAST_EXPONENT)
    mantissas = torch.round(padded * _power_of_two(-exponent)[..., None])
    unknown = top.isnan()
    mantissas = torch.where(unknown[..., None], 0, mantissas).flatten(-2)[..., :dim]
    exponent = torch.where(unknown, NOT_A_NUMBER, exponent)
    return torch.cat([mantissas.to(torch.int8), exponent.to(torch.int8)], -1)
