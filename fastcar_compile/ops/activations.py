"""Activations by table: act(x) = x * factor(x). The factor is in integers, with one definition for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fastcar_compile.ops.operator import operator

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


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def _tanh_gate(x: float) -> float:
    return _sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)) if x > -20.0 else 0.0


FACTORS = {
    "silu": FactorTable(16.0, _sigmoid, 2e-4),
    "gelu": FactorTable(8.0, _normal_cdf, 1.4e-4),
    "gelu_tanh": FactorTable(8.0, _tanh_gate, 1.4e-4),
}
"""Activation -> its table. max|f'| and max|f''|: 0.25, 0.0963 (silu); 0.399, 0.242 (gelu); 0.399, 0.26 (gelu_tanh)."""


@cache
def factor_table(activation: str) -> Tensor:
    """Return the knots of an activation, int32 [513]: round(factor(-limit + j * limit / 256) * 2**24)."""
    table = FACTORS[activation]
    # In float64, rounded once: the table is data, and the same wherever it is made.
    knots = [table.factor(j * table.limit / 256 - table.limit) * 2.0**FRACTION_BITS for j in range(KNOTS)]
    return torch.from_numpy(np.rint(knots).astype(np.int32))


@operator("activation_factor", reason="The factor of the activation, from the table that the accelerator has too.")
def activation_factor(x: Tensor, activation: str) -> Tensor:
    """Return the table factor, interpolated in integers between 513 knots: float32 of any shape, as x.

    Args:
        activation: one of `FACTORS`; act(x) is x * activation_factor(x, activation).
    """
    table = FACTORS[activation]
    scaled = x.clamp(-table.limit, table.limit) * table.input_scale
    # From 0 to 2 * INPUT_STEPS: bits 6 and up are the knot, the lower 6 bits the place between two knots.
    fixed = torch.round(scaled).to(torch.int32) + INPUT_STEPS
    # At the upper end the last interval is taken with fraction 64, which is its right knot.
    index = (fixed >> 6).clamp(max=KNOTS - 2)
    fraction = fixed - (index << 6)
    knots = factor_table(activation).to(x.device)
    low, high = knots[index], knots[index + 1]
    # A knot is at most about 2^24, so the blend stays below 2^31; adding 32 rounds the shift to nearest.
    return ((low * (64 - fraction) + high * fraction + 32) >> 6).float() * 2.0**-FRACTION_BITS


@activation_factor.register_fake
def _(x: Tensor, activation: str) -> Tensor:
    return torch.empty_like(x)
