"""The table activations against the exact functions: the stated error bounds, and their knots."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastcar_compile.ir.ops.linear import FACTORS

EXACT = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def inputs(limit: float) -> torch.Tensor:
    """Every step of the fixed-point input, its ties, points around them, and far outside."""
    steps = torch.arange(-16384 * 4 - 8, 16384 * 4 + 9, dtype=torch.float64) * (limit / 65536)
    return torch.cat([steps, steps[::8] * 1.37, torch.tensor([-1e30, -1000.0, 1000.0, 1e30])]).float()


@pytest.mark.parametrize(
    "activation", [a if a == "silu" else pytest.param(a, marks=pytest.mark.thorough) for a in sorted(FACTORS)]
)
def test_the_stated_bound_holds_and_is_no_guess(activation: str) -> None:
    table = FACTORS[activation]
    x = inputs(table.limit)
    got = torch.ops.fastcar.activation_factor(x, activation).double().numpy()
    want = np.array([table.factor(float(v)) if abs(v) < 700 else float(v > 0) for v in x])
    error = np.abs(got - want).max()
    assert 0.5 * table.error < error < table.error


@pytest.mark.parametrize("activation", sorted(FACTORS))
def test_the_activation_is_the_one_pytorch_knows(activation: str) -> None:
    x = torch.linspace(-12, 12, 48_001)
    got = x * torch.ops.fastcar.activation_factor(x, activation)
    error = (got - EXACT[activation](x)).abs()
    assert (error <= x.abs() * FACTORS[activation].error + 1e-6).all()
    assert error.max() < 2e-4
