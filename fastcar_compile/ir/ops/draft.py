"""Operators of a draft, the surrogate of an MLP (docs/explanation/drafts.md): draft_gain, draft_difference, draft_sum.

Every product and sum is rounded to float32 once, in the order given, so that all backends have the same bits.
"""

import torch
from torch import Tensor

from fastcar_compile.ir.ops.gates import input_delta
from fastcar_compile.ir.ops.operator import operator


@operator(
    "How much of what the draft leaves of the cached output still holds, by the change of the MLP's input.",
    lambda x: x.new_empty(x.shape[:1]),
)
def draft_gain(x: Tensor, cached: Tensor, edges: Tensor, gains: Tensor) -> Tensor:
    """Return gains[i] where i edges are at most the change `input_delta(x, cached)`.

    Args:
        x, cached: float32 [B, H]. edges: float32 [n - 1], not falling. gains: float32 [n].

    Returns:
        float32 [B]; 0 where the change is not a number.
    """
    change = input_delta(x, cached)
    # No comparison with a NaN holds, so its row would get the first gain.
    place = (change[:, None] >= edges).sum(-1)
    return torch.where(change.isnan(), 0.0, gains[place])


@operator(
    "The part of a sum over both inputs that the gain leaves.",
    lambda both, gain: both.new_empty((gain.shape[0], both.shape[1])),
)
def draft_difference(both: Tensor, gain: Tensor) -> Tensor:
    """Return both[:B] - gain * both[B:], float32 [B, K], for both float32 [2 B, K] and gain float32 [B]."""
    own, cached = both.chunk(2)
    return own - gain[:, None] * cached


@operator("The output of a row that replays: the draft's, and what the gain leaves of the cached output.")
def draft_sum(left: Tensor, cached: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """Return bias + gain * (cached - bias) + left, float32 [B, H].

    Args:
        left: what the draft's linears make of what the gain leaves; cached: both float32 [B, H]. bias: float32 [H].
        gain: float32 [B].
    """
    return bias + gain[:, None] * (cached - bias) + left
