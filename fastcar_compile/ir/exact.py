"""The arithmetic of `numerics="exact"` in numpy: the reference that every backend and the accelerator's C++ equal.

docs/reference/numerics.md ("A decode step, bit for bit") defines it. Everything is IEEE float32, rounded once per
operation and half to even; sums are exact integers, or float32 in the order given.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.int8]
Flags = npt.NDArray[np.bool_]

BLOCK = 32
"""Values that share an exponent, and cache rows of a tile."""

WIDE_BITS, LIMB_BITS = 15, 7
"""Bits of a wide mantissa with its sign, and of its lower limb, which has no sign."""

LEAST_EXPONENT, NOT_A_NUMBER = -120, -128
"""Least exponent of a block, and that of a block with a NaN."""

LARGEST_VALUE = np.float32(127 * 2.0**121)
"""Values of a block are limited to this magnitude."""

EXPONENT_BITS, MANTISSA_BITS = 0xFF, 23
NORM_BITS, MEAN_BITS, NORM_FIELD = 18, 23, 94
"""Bits of a norm's integers, of a mean's, and the least exponent field that scales a row: its squares stay normal."""

EXP_KNOTS = 256
EXP_BITS, EXP_INPUT_BITS = 24, 16
EXP_LIMIT = -30.0
"""Knots of 2^x on [0, 1], fraction bits of a numerator and of its logit; a smaller logit is taken for the limit."""

EXP_TABLE: Integers = np.rint(np.exp2(np.arange(EXP_KNOTS + 1) / EXP_KNOTS) * 2.0**EXP_BITS).astype(np.int64)
"""int64 [257]: round(2^(j / 256) * 2^24)."""


def power_of_two(exponent: Any) -> Floats:
    """Return 2^exponent for -126 to 127, made of its bits."""
    return ((np.asarray(exponent, np.int32) + 127) << MANTISSA_BITS).view(np.float32)


def logit_factor(scale: float) -> np.float32:
    """Return the factor of a layer's logits: they are exponents of two."""
    return np.float32(scale * math.log2(math.e))


def _integers(x: Floats, bits: int) -> tuple[Integers, Floats, Flags]:
    """Return rows [..., H] as integers of at most 2^bits, the scale of each row, and whether it is finite."""
    top = np.abs(x).max(-1, keepdims=True)
    # The floor keeps the scale of the squares above float32's subnormal numbers.
    field = np.maximum(top.view(np.int32) >> MANTISSA_BITS, NORM_FIELD)
    finite = field < EXPONENT_BITS
    shift = np.where(finite, field - 126 - bits, 0)
    with np.errstate(all="ignore"):
        integers = np.where(finite, np.rint(x * power_of_two(-shift)), np.float32(0)).astype(np.int64)
    return integers, power_of_two(shift), finite


def layer_norm(x: Floats, weight: Floats, bias: Floats, epsilon: float) -> Floats:
    """Return the layer norm of rows [..., H], weight and bias [H]."""
    integers, scale, finite = _integers(x, MEAN_BITS)
    with np.errstate(all="ignore"):
        mean = (integers.sum(-1, keepdims=True).astype(np.float32) * np.float32(1 / x.shape[-1])) * scale
        y = rms_norm(x - mean, weight, epsilon) + bias
    return np.where(finite, y, np.float32(np.nan)).astype(np.float32)


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Return the root-mean-square norm of rows [..., H], weight [H]."""
    # The largest magnitude of a row becomes an integer of at most 2^18, so 2^36 bounds its square.
    integers, scale, finite = _integers(x, NORM_BITS)
    with np.errstate(all="ignore"):
        squares = integers * integers
        # The integer sum is exact in any order. It rounds to float32 once, here.
        mean = squares.sum(-1, keepdims=True).astype(np.float32) * np.float32(1 / x.shape[-1])
        # The scale multiplies twice: its square alone may leave the range of float32.
        root = np.sqrt((mean * scale) * scale + np.float32(epsilon))
        y = (x * (np.float32(1) / root)) * weight
    return np.where(finite, y, np.float32(np.nan)).astype(np.float32)


def rotary(x: Floats, table: Floats, position: int) -> Floats:
    """Return rows [..., T, D] with their first R elements rotated by rows position, position + 1, … of a table [S, R].

    A row of the table has R / 2 cosines, then R / 2 sines. Rows past its last one are its last one.
    """
    rows = table[np.clip(position + np.arange(x.shape[-2], dtype=np.int64), None, len(table) - 1)]
    half = table.shape[1] // 2
    cos, sin = rows[:, :half], rows[:, half:]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1).astype(np.float32)


@dataclass(frozen=True)
class Blocks:
    """Blocks of 32 values: `mantissas` [..., n, 32] times 2^`exponents` [..., n]. Exponent -128: the block is NaN."""

    mantissas: Integers
    exponents: Integers


def blocks(values: Floats, bits: int) -> Blocks:
    """Return values [..., K] in blocks along the last axis, padded with zeros.

    A mantissa has `bits` bits with its sign. The exponent is the least one, from -120 on, with which no mantissa of the
    block rounds to 2^(bits - 1).
    """
    limited = np.clip(values, -LARGEST_VALUE, LARGEST_VALUE)
    spare = -values.shape[-1] % BLOCK
    padded = np.pad(limited, [(0, 0)] * (values.ndim - 1) + [(0, spare)])
    padded = padded.reshape(*values.shape[:-1], -1, BLOCK)
    top = np.abs(padded).max(-1)
    unknown = np.isnan(top)
    # Adding half of a mantissa's last bit carries into the exponent exactly where rounding would reach 2^(bits - 1).
    exponents = ((top.view(np.int32) + (1 << (24 - bits))) >> MANTISSA_BITS) - (125 + bits)
    exponents = np.maximum(np.where(unknown, 0, exponents), LEAST_EXPONENT)
    scaled = np.where(unknown[..., None], np.float32(0), padded) * power_of_two(-exponents)[..., None]
    return Blocks(np.rint(scaled).astype(np.int64), np.where(unknown, NOT_A_NUMBER, exponents).astype(np.int64))


def limbs(mantissas: Integers) -> tuple[Bytes, Bytes]:
    """Return wide mantissas as (high, low): 128 * high + low, low from 0 to 127."""
    # The shift rounds down for negative numbers too, so the low limb is never negative.
    return (mantissas >> LIMB_BITS).astype(np.int8), (mantissas & (1 << LIMB_BITS) - 1).astype(np.int8)


def stored_rows(values: Floats) -> Bytes:
    """Return keys or values [..., D] as rows of an int8 cache: D mantissas, then one exponent per block."""
    made = blocks(values, 8)
    flat = made.mantissas.reshape(*values.shape[:-1], -1)[..., : values.shape[-1]]
    return np.concatenate([flat, made.exponents], -1).astype(np.int8)


def cached_blocks(rows: Bytes, dim: int) -> Blocks:
    """Return rows of an int8 cache as blocks, the last one padded with zeros; `dim` is the head dimension."""
    mantissas, exponents = rows[..., :dim].astype(np.int64), rows[..., dim:].astype(np.int64)
    spare = -dim % BLOCK
    padded = np.pad(mantissas, [(0, 0)] * (rows.ndim - 1) + [(0, spare)])
    return Blocks(padded.reshape(*rows.shape[:-1], -1, BLOCK), exponents)


def logits(query: Floats, keys: Bytes, factor: np.float32) -> Floats:
    """Return the logits [S] of one query row [D] with cached rows [S, D + n], as exponents of two."""
    own, other = blocks(query, WIDE_BITS), cached_blocks(keys, len(query))
    # A product has 21 bits and a block 32 of them: the int64 sum is exact.
    sums = (own.mantissas * other.mantissas).sum(-1)
    # The sum of two exponents may leave float32's range; both ends are then taken for the limit.
    exponents = np.clip(own.exponents + other.exponents, -126, 127)
    with np.errstate(over="ignore"):
        parts = sums.astype(np.float32) * power_of_two(exponents)
        total = parts[:, 0]
        # Float32 addition is not associative: the blocks are added in this order everywhere.
        for block in range(1, parts.shape[1]):
            total = total + parts[:, block]
    unknown = (own.exponents == NOT_A_NUMBER).any() | (other.exponents == NOT_A_NUMBER).any(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(unknown, np.float32(np.nan), total * factor)


def numerators(differences: Floats | npt.NDArray[np.float64]) -> Integers:
    """Return 2^differences as integers of 2^-24, for differences of at most 0; half of 2^-24 and less is 0."""
    units = np.rint(np.maximum(differences, np.float32(EXP_LIMIT)) * np.float32(1 << EXP_INPUT_BITS)).astype(np.int64)
    shift, fraction = -(units >> EXP_INPUT_BITS), units & (1 << EXP_INPUT_BITS) - 1
    knot, rest = fraction >> 8, fraction & 255
    # Linear interpolation between two knots, rounded half up by the 128.
    power = EXP_TABLE[knot] + (((EXP_TABLE[knot + 1] - EXP_TABLE[knot]) * rest + 128) >> 8)
    # The added half rounds to nearest. It is 0 for a shift of 0.
    return (power + ((1 << shift) >> 1)) >> shift


def weighted_values(weights: Integers, values: Bytes, dim: int) -> Floats:
    """Return the sum of cached value rows [S, D + n] times weights [S] in units of 2^-24: float32 [D].

    Tiles are 32 successive rows of the cache. In a tile the weights times 2^e, e being the exponents of the rows in one
    block of columns, are a wide block.
    """
    spare, own = -len(weights) % BLOCK, cached_blocks(values, dim)
    # Weights count units of 2^-24, so 24 leaves the exponent; -126 is the least that is not subnormal.
    scaled = weights.astype(np.float32)[:, None] * power_of_two(np.maximum(own.exponents - 24, -126))
    total = np.zeros((own.exponents.shape[1], BLOCK), np.float32)
    scaled = np.pad(scaled, [(0, spare), (0, 0)])
    mantissas = np.pad(own.mantissas, [(0, spare), (0, 0), (0, 0)])
    for start in range(0, len(scaled), BLOCK):
        tile = blocks(np.ascontiguousarray(scaled[start : start + BLOCK].T), WIDE_BITS)  # [n, 1, 32]
        sums = np.einsum("nj,jnc->nc", tile.mantissas[:, 0], mantissas[start : start + BLOCK])
        with np.errstate(over="ignore", invalid="ignore"):
            total = total + sums.astype(np.float32) * power_of_two(tile.exponents)
    return total.reshape(-1)[:dim]


def attention(query: Floats, keys: Bytes, values: Bytes, visible: Flags, factor: np.float32) -> Floats:
    """Return what one query row [D] of a head attends to in cached rows [S, D + n], of which bool [S] are visible.

    At least one is. `factor`: of the logits (`logit_factor`).
    """
    dim, seen = len(query), visible
    with np.errstate(over="ignore", invalid="ignore"):
        found = logits(query, keys, factor)
        # Only visible rows count: a hidden row may hold a larger logit of an older sequence.
        top = found[seen].max()
        if not np.isfinite(top):
            return np.full(dim, np.nan, np.float32)
        weights = np.where(seen, numerators(np.where(seen, found - top, np.float32(0))), 0)
        inverse = np.float32(1) / (weights.sum().astype(np.float32) * np.float32(2.0**-EXP_BITS))
        # Hidden rows become zeros with exponent 0, so a NaN in one of them cannot reach the sum.
        y = weighted_values(weights, np.where(seen[:, None], values, np.int8(0)), dim) * inverse
    unknown = (values[seen, dim:] == NOT_A_NUMBER).any(0)
    return np.where(np.repeat(unknown, BLOCK)[:dim], np.float32(np.nan), y)
