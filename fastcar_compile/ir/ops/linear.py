"""w8a8 and w4a8 linears with one exact definition for every backend (docs/reference/numerics.md)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fastcar_compile.config.formats import GROUP
from fastcar_compile.ir.ops.operator import operator

SMALLEST_GROUP_SCALE, LARGEST_GROUP_SCALE = 2.0**-14, 65504.0
"""Range of the normal float16 numbers. Without subnormals, a shift of the bits turns a scale into float32."""

_TINY = 1e-30
_INV_127 = float(np.float32(1.0) / np.float32(127.0))


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return symmetric int8 weights per output channel: float32 [N, K] -> (int8 [N, K], float32 scale [N])."""
    scale = weight.abs().amax(1) / 127
    # A row of zeros keeps scale 1, so nothing is divided by 0.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def group_count(inputs: int) -> int:
    """Return the number of groups of 128 along a reduction of `inputs`; the last group may be padded."""
    return -(-inputs // GROUP)


def quantize_weight_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return symmetric int4 weights (-7 .. 7 times a float16 scale) in groups of 128 along K, padded with zeros.

    Args:
        weight: float32 [N, K].

    Returns:
        uint8 [N, 64 * G], packed as `pack_int4` does, and float16 scale [N, G], G = ceil(K / 128).
    """
    channels, inputs = weight.shape
    groups = group_count(inputs)
    spare = groups * GROUP - inputs
    padded = torch.nn.functional.pad(weight.float(), (0, spare)) if spare else weight.float()
    padded = padded.reshape(channels, groups, GROUP)
    # Rounded to float16 before the division below: weights are rounded to what the stored scale can give.
    scale = (padded.abs().amax(2) / 7).clamp(SMALLEST_GROUP_SCALE, LARGEST_GROUP_SCALE).to(torch.float16)
    quantized = (padded / scale.float()[..., None]).round_().clamp_(-7, 7).to(torch.int8)
    return pack_int4(quantized.reshape(channels, -1)), scale


def pack_int4(values: Tensor) -> Tensor:
    """Return int8 [N, 128 * G] of -8 .. 7 as uint8 [N, 64 * G]: byte i of a group has element i (low) and 64 + i."""
    low, high = values.reshape(len(values), -1, 2, GROUP // 2).unbind(2)
    # Two's complement nibbles: `& 15` drops the sign bits that int8 repeats.
    return ((low & 15) | ((high & 15) << 4)).view(torch.uint8).reshape(len(values), -1)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return uint8 [N, 64 * G] as int8 [N, 128 * G]: the inverse of `pack_int4`."""
    halves = packed.view(torch.int8).reshape(len(packed), -1, 1, GROUP // 2)
    # int8 shifts are arithmetic, so they bring a nibble's sign back.
    return torch.cat([(halves << 4) >> 4, halves >> 4], 2).reshape(len(packed), -1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return dynamic symmetric int8 rows: float32 [..., K] -> (int8 [..., K], float32 scale [...])."""
    amax = x.abs().amax(-1).clamp(min=_TINY)
    # A true division: `127.0 / amax` is reciprocal times 127 in PyTorch, which rounds twice.
    inverse = torch.full_like(amax, 127.0) / amax
    quantized = torch.clamp(torch.round(x * inverse[..., None]), -127, 127).to(torch.int8)
    return quantized, amax * _INV_127


def accumulate(quantized: Tensor, qweight: Tensor) -> Tensor:
    """Return the exact integer product int32 [..., N] of int8 [..., K] and int8 [N, K].

    float64 has every partial sum exactly (127 * 127 * K < 2**53). It is the fast exact path on a CPU.
    """
    return (quantized.double() @ qweight.double().T).to(torch.int32)


def accumulate_groups(quantized: Tensor, qweight: Tensor) -> Tensor:
    """Return the exact sums of every group, int32 [G, M, N], of M rows int8 [..., K] and packed int4 [N, 64 * G].

    float32 has every partial sum exactly (127 * 8 * 128 < 2**24).
    """
    weight = unpack_int4(qweight)
    rows = quantized.reshape(-1, quantized.shape[-1])
    rows = torch.nn.functional.pad(rows, (0, weight.shape[1] - rows.shape[1]))
    grouped = (t.reshape(len(t), -1, GROUP).transpose(0, 1).float() for t in (rows, weight))
    left, right = grouped
    return (left @ right.transpose(1, 2)).to(torch.int32)


def scaled_int8(quantized: Tensor, scale: Tensor, qweight: Tensor, wscale: Tensor) -> Tensor:
    """Return `linear_w8a8` of rows that are quantised, without the bias."""
    return accumulate(quantized, qweight).float() * (scale[..., None] * wscale)


def scaled_int4(quantized: Tensor, scale: Tensor, qweight: Tensor, wscale: Tensor) -> Tensor:
    """Return `linear_w4a8` of rows that are quantised, without the bias."""
    # Groups are added in ascending order, each product rounded first: the order is part of the definition.
    total = None
    for acc, group_scale in zip(accumulate_groups(quantized, qweight), wscale.float().T, strict=True):
        part = acc.float() * group_scale
        total = part if total is None else total + part
    assert total is not None
    return total.reshape(*quantized.shape[:-1], len(qweight)) * scale[..., None]


def _product(x: Tensor, qweight: Tensor) -> Tensor:
    """Return the result of a linear [..., N] without its values, for x [..., K] and a weight with N rows."""
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


@operator("A linear with int8 weights and inputs; the sum is exact in int32.", _product)
def linear_w8a8(x: Tensor, qweight: Tensor, wscale: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear with dynamic int8 activations and int8 weights.

    Args:
        x: float32 [..., K].
        qweight: int8 [N, K].
        wscale: float32 [N].
        bias: float32 [N] or None.

    Returns:
        float32 [..., N] = float32(acc) * (row scale * wscale) (+ bias).
    """
    y = scaled_int8(*quantize_rows(x), qweight, wscale)
    return y if bias is None else y + bias


@operator("A linear with int4 weights and int8 inputs; the sum is exact in int32.", _product)
def linear_w4a8(x: Tensor, qweight: Tensor, wscale: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear with dynamic int8 activations and int4 weights in groups of 128.

    Args:
        x: float32 [..., K].
        qweight: uint8 [N, 64 * G] as packed by `pack_int4`, G = ceil(K / 128).
        wscale: float16 [N, G].
        bias: float32 [N] or None.

    Returns:
        float32 [..., N] = row scale * (sum over groups, ascending, of float32(acc) * wscale) (+ bias). Every product
        and sum is rounded to float32 once.
    """
    y = scaled_int4(*quantize_rows(x), qweight, wscale)
    return y if bias is None else y + bias


# Activations by table: act(x) = x * factor(x). The factor is in integers, with one definition for every backend.


KNOTS = 513
FRACTION_BITS = 24
INPUT_STEPS = 16384
"""Fixed-point input steps on either side of zero; 64 steps are between two knots."""


@dataclass(frozen=True)
class FactorTable:
    """The factor of one activation.

    Args:
        limit: a power of two. The knots are spread evenly over [-limit, limit]; beyond it the end values hold.
        factor: the exact function in float64.
        error: bound of the absolute error against `factor`: (limit / 256)**2 / 8 * max|f''| for the interpolation, plus
            limit / 2**15 * max|f'| for the input step, plus at most 1e-6 for rounding and the two ends.
    """

    limit: float
    factor: Callable[[float], float]
    error: float

    @property
    def input_scale(self) -> float:
        """Fixed-point steps per unit of the input."""
        return INPUT_STEPS / self.limit


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


FACTORS = {
    "silu": FactorTable(16.0, _sigmoid, 2e-4),
    "gelu": FactorTable(8.0, lambda x: 0.5 * math.erfc(-x / math.sqrt(2.0)), 1.4e-4),
    # sigmoid(2 a) is (1 + tanh(a)) / 2.
    "gelu_tanh": FactorTable(8.0, lambda x: _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)), 1.4e-4),
}
"""Activation -> its table. max|f'| and max|f''|: 0.25, 0.0963 (silu); 0.399, 0.242 (gelu); 0.399, 0.26 (gelu_tanh)."""


@cache
def factor_table(activation: str) -> Tensor:
    """Return the knots of an activation, int32 [513]: round(factor(-limit + j * limit / 256) * 2**24)."""
    table = FACTORS[activation]
    # In float64, rounded once: the table is data, and the same wherever it is made.
    knots = [table.factor(j * table.limit / 256 - table.limit) * 2.0**FRACTION_BITS for j in range(KNOTS)]
    return torch.from_numpy(np.rint(knots).astype(np.int32))


@operator("The factor of the activation, from the table that the accelerator has too.")
def activation_factor(x: Tensor, activation: str) -> Tensor:
    """Return the table factor, interpolated in integers between 513 knots: float32 of any shape, as x.

    Args:
        activation: one of `FACTORS`; act(x) is x * activation_factor(x, activation).
    """
    table = FACTORS[activation]
    # Of a NaN any factor will do: its product with x is NaN.
    scaled = x.clamp(-table.limit, table.limit).nan_to_num(nan=table.limit) * table.input_scale
    # From 0 to 2 * INPUT_STEPS: bits 6 and up are the knot, the lower 6 bits the place between two knots.
    fixed = torch.round(scaled).to(torch.int32) + INPUT_STEPS
    # At the upper end the last interval is taken with fraction 64, which is its right knot.
    index = (fixed >> 6).clamp(max=KNOTS - 2)
    fraction = fixed - (index << 6)
    knots = factor_table(activation).to(x.device)
    low, high = knots[index], knots[index + 1]
    # A knot is at most about 2^24, so the blend stays below 2^31; adding 32 rounds the shift to nearest.
    return ((low * (64 - fraction) + high * fraction + 32) >> 6).float() * 2.0**-FRACTION_BITS


@operator("A linear with weights of 16 bits.", lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0])))
def linear_half(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear of 16-bit floats, each converted to float32, which is exact.

    Args:
        x: float32 [..., K].
        weight: bfloat16 or float16 [N, K].
        bias: float32 [N] or None.

    Returns:
        float32 [..., N] = x @ weight.T (+ bias), summed in float32 in any order.
    """
    return torch.nn.functional.linear(x, weight.float(), bias)


FLOAT_LINEARS = {torch.ops.fastcar.linear_half: 2}
"""Operator -> place of the bias among its arguments; the sums have no order."""

INTEGER_LINEARS = {torch.ops.fastcar.linear_w8a8: 3, torch.ops.fastcar.linear_w4a8: 3}
"""The same of linears whose sums are of integers, or in a stated order."""
