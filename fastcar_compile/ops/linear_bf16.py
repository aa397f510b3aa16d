"""Linear with bfloat16 weights. Activations and sums are float32."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.ops.operator import operator


@operator("linear_bf16", reason="A linear with bfloat16 weights.")
def linear_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear of bfloat16 weights, each converted to float32, which is exact.

    Args:
        x: float32 [..., K].
        weight: bfloat16 [N, K].
        bias: float32 [N] or None.

    Returns:
        float32 [..., N] = x @ weight.T (+ bias), summed in float32 in any order.
    """
    return torch.nn.functional.linear(x, weight.float(), bias)


@linear_bf16.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
