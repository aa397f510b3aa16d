"""What a cache keeps of keys and values: float32 as it is, float16, or int8 with an exponent per block (MXINT8)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.formats import KV_TYPES, kv_type

FLOAT16_MAX = 65504.0
"""What a float16 cache keeps of anything larger, infinities too."""

BLOCK = KV_TYPES["int8"].block
"""Elements of a row that share an exponent in an int8 cache, as in OCP's Microscaling Formats, MXINT8."""

LEAST_EXPONENT = -120
"""No scale, its inverse, or product with one is subnormal then: a CPU that flushes those has the same numbers."""

INT8_MAX = 127 * 2.0**121
"""What an int8 cache keeps of anything larger, infinities too: 64 * 2^122 would overflow where it is read."""

BIAS, MANTISSA_BITS = 127, 23
"""Of a float32."""

NOT_A_NUMBER = -128
"""The exponent of a block that holds a NaN; its mantissas are 0. As a scale it is the bits of minus infinity."""

ROUNDS_UP = 1 << 16
"""Added to the bits of a float32, it carries into the exponent where the mantissa, 1 to 2, is 127.5 / 64 or more."""

EXCESS = BIAS + 6
"""Of a float32's exponent field over the scale's: a mantissa has 7 bits before the point."""


def row_size(dim: int, dtype: torch.dtype | str) -> int:
    """Return the elements of a cached row of `dim` values: those, and the exponents of its blocks behind them."""
    return kv_type(dtype).row_size(dim)


def head_dim(row: int, dtype: torch.dtype | str) -> int:
    """Return the head dimension of a cached row; the inverse of `row_size`."""
    return kv_type(dtype).head_dim(row)


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values float32 [..., D] as their cache keeps them, [..., row_size(D, dtype)].

    float16: the nearest one, half to even; beyond ±65504 it is ±65504, and a NaN stays one. int8: D mantissas m from
    -127 to 127, then the exponents e of their blocks. The value is m * 2^e, e the least one from -120 on with which no
    mantissa of the block rounds (half to even) to more than 127. Beyond ±127 * 2^121 it is that; all of a block that
    holds a NaN is NaN.
    """
    if dtype == torch.float16:
        return value.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(dtype)
    return _blocks(value) if dtype == torch.int8 else value


def loaded(rows: Tensor, dim: int) -> Tensor:
    """The float32 [..., dim] that rows of a cache stand for, exactly; `dim` is a head's dimension."""
    if rows.dtype != torch.int8:
        return rows.to(torch.float32)
    scales = _power_of_two(rows[..., dim:]).repeat_interleave(BLOCK, -1)
    return rows[..., :dim] * scales[..., :dim]


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, by its bits."""
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
