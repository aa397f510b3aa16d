"""What an evaluation of thresholds gives: means, or every token's own result."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measurement:
    """A teacher-forced result.

    Attributes:
        nll: nats per token that counts, from the second frame on.
        ratios: for each layer, the share of the forwards t >= F that replayed.
        scores: for each layer, the scores of those forwards, float32 [n].
        shares: for each video, or with couple_cfg each pair of videos, the mean of its layers' ratios.
    """

    nll: float
    ratios: tuple[float, ...]
    scores: tuple[Tensor, ...] = field(repr=False)
    shares: tuple[float, ...] = ()

    @property
    def replay(self) -> float:
        """Mean of the layers' ratios."""
        return sum(self.ratios) / len(self.ratios)


@dataclass(frozen=True)
class Details:
    """A teacher-forced result by token: N videos, n predicted tokens (all but the prompt), L layers, t decode forwards.

    Attributes:
        losses: float32 [N, n], nats. The first tokens_per_frame are the first frame.
        predicted: int64 [N, n], the most likely symbol given the true past, of those that count.
        counted: bool [N, n], whether the token counts in a mean.
        replayed: bool [L, N, t], whether each forward replayed.
    """

    losses: Tensor
    predicted: Tensor
    counted: Tensor
    replayed: Tensor


def counts(tokens: Tensor, counted: tuple[int, int] | None) -> Tensor:
    """Return which tokens count in a mean, bool of their shape."""
    if counted is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    first, end = counted
    return (tokens >= first) & (tokens < end)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses in nats, float32 [rows, n], of logits [rows, n, V] and targets [rows, n]."""
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
