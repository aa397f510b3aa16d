"""w8a8 operators with one exact definition for every backend (docs/architecture.md, "w8a8, bit for bit")."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.library import custom_op

SIGMOID_RANGE = 16.0
SIGMOID_STEPS_PER_UNIT = 16
SIGMOID_FRACTION_BITS = 24
_TINY = 1e-30
_INV_127 = float(np.float32(1.0) / np.float32(127.0))


@cache
def sigmoid_table() -> Tensor:
    """int32 [513]: round(sigmoid(-16 + j / 16) * 2**24), the knots of the table sigmoid."""
    knots = np.arange(2 * int(SIGMOID_RANGE) * SIGMOID_STEPS_PER_UNIT + 1) / SIGMOID_STEPS_PER_UNIT - SIGMOID_RANGE
    return torch.from_numpy(np.rint(2.0**SIGMOID_FRACTION_BITS / (1.0 + np.exp(-knots))).astype(np.int32))


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per output channel: float32 [N, K] -> (int8 [N, K], float32 scale [N])."""
    scale = weight.abs().amax(1) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    quantized = torch.clamp(torch.round(weight / scale[:, None]), -127, 127).to(torch.int8)
    return quantized, scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic symmetric int8 per row: float32 [..., K] -> (int8 [..., K], float32 scale [...])."""
    amax = x.abs().amax(-1).clamp(min=_TINY)
    # A true division: `127.0 / amax` is reciprocal times 127 in PyTorch, which rounds twice.
    inverse = torch.full_like(amax, 127.0) / amax
    quantized = torch.clamp(torch.round(x * inverse[..., None]), -127, 127).to(torch.int8)
    return quantized, amax * _INV_127


def accumulate(quantized: Tensor, qweight: Tensor) -> Tensor:
    """Exact integer product: int8 [..., K] with int8 [N, K] -> int32 [..., N].

    float64 holds every partial sum exactly (127 * 127 * K < 2**53), and is the fast exact path on CPU.
    """
    return (quantized.double() @ qweight.double().T).to(torch.int32)


@custom_op("fastcar::linear_w8a8", mutates_args=())
def linear_w8a8(x: Tensor, qweight: Tensor, wscale: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer with dynamic int8 activations and int8 weights.

    Args:
        x: float32 [..., K].
        qweight: int8 [N, K].
        wscale: float32 [N].
        bias: float32 [N] or None.

    Returns:
        float32 [..., N] = float32(acc) * (row scale * wscale) (+ bias).
    """
    quantized, scale = quantize_rows(x)
    y = accumulate(quantized, qweight).float() * (scale[..., None] * wscale)
    return y if bias is None else y + bias


@linear_w8a8.register_fake
def _(x: Tensor, qweight: Tensor, wscale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


@custom_op("fastcar::sigmoid_lut", mutates_args=())
def sigmoid_lut(x: Tensor) -> Tensor:
    """Table sigmoid in integers, linear interpolation between 513 knots on [-16, 16]; float32, same shape.

    The absolute error is at most 2e-4: 4.7e-5 from interpolation (h**2 / 8 * max|sigmoid''|), 1.2e-4 from the
    input step (2**-11 / 4).
    """
    fixed = torch.round(x.clamp(-SIGMOID_RANGE, SIGMOID_RANGE) * 1024).to(torch.int32) + 16384
    index = (fixed >> 6).clamp(max=511)
    fraction = fixed - (index << 6)
    table = sigmoid_table().to(x.device)
    low, high = table[index], table[index + 1]
    return ((low * (64 - fraction) + high * fraction + 32) >> 6).float() * 2.0**-SIGMOID_FRACTION_BITS


@sigmoid_lut.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
