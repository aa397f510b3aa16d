"""Trainable gates: differentiable scores of many tokens at once.

They are the float32 formulas of the gates. Compiled gates round their terms and sum them exactly
(docs/reference/numerics.md), so a decision may differ where a score is within that rounding of the threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcar_compile.tune.training.relaxed import Sample, Scorer

FIRST_SHARE = 0.5
"""Replay of an untrained gate on the dense decoder."""

SPREAD = 0.02
"""Standard deviation of the first weights, for inputs of size 1."""

CHANGE = 0.03
"""Mean of the first weights of |x - x_cached|: an untrained gate measures the size of the change."""

STEEPNESS = 3.0
"""Sum of the first output weights: the spread of the scores, for decisions of softness 1."""

Weights = dict[str, Tensor]


class LearnedScorer(Scorer):
    """score = w2 . relu(w1 @ [x ; |x - x_cached|] + b1) + b2.

    Args:
        sample: inputs of the layer's gate; they set the scale of x and the first b2. units: size of the hidden layer.
        random: source of the first weights.
    """

    def __init__(self, sample: Sample, units: int, random: torch.Generator) -> None:
        super().__init__()
        width = sample.x.shape[-1]
        first, second, third = (torch.randn(*shape, generator=random) for shape in ((units, width),) * 2 + ((units,),))
        # The scale of x differs by layer. Dividing by it lets one learning rate fit all layers.
        self._scale = float(sample.x.square().mean().sqrt().clamp(min=1e-12))
        self.by_input = nn.Parameter(SPREAD * first)
        self.by_change = nn.Parameter(CHANGE + SPREAD * second)
        self.b1 = nn.Parameter(torch.zeros(units))
        self.w2 = nn.Parameter((STEEPNESS + third) / units)
        self.b2 = nn.Parameter(torch.zeros(()))
        with torch.no_grad():
            before, after = sample.x[:, :-1], sample.x[:, 1:]
            scores = self.score(self.prepare(sample.query, sample.earlier, after), after, before)
            self.b2 -= _quantile(scores, FIRST_SHARE)

    def prepare(self, query: Tensor, earlier: Tensor, x: Tensor) -> Tensor:
        """Return the contribution of x to the hidden layer."""
        return nn.functional.linear(x / self._scale, self.by_input, self.b1)

    def score(self, prepared: Tensor, x: Tensor, cached: Tensor) -> Tensor:
        """Return the scores of one or more frames."""
        change = nn.functional.linear((x - cached).abs() / self._scale, self.by_change)
        return torch.relu(prepared + change) @ self.w2 + self.b2

    def weights(self) -> Weights:
        """Return the weights of gate `learned`, float32: w1 [units, 2 H], b1 [units], w2 [units], b2 [1]."""
        # The scale moves into the weights: a compiled gate reads x as it is.
        w1 = torch.cat([self.by_input, self.by_change], 1) / self._scale
        found = {"w1": w1, "b1": self.b1, "w2": self.w2, "b2": self.b2[None]}
        return {name: tensor.detach().float().contiguous().clone() for name, tensor in found.items()}

    def threshold(self) -> float:
        """Return 0: b2 contains the threshold."""
        return 0.0

    def assign(self, weights: Weights, threshold: float) -> None:
        """Set the weights; b2 takes the threshold."""
        by_input, by_change = (weights["w1"] * self._scale).chunk(2, 1)
        found = (by_input, by_change, weights["b1"], weights["w2"], weights["b2"][0] - threshold)
        for own, given in zip((self.by_input, self.by_change, self.b1, self.w2, self.b2), found, strict=True):
            own.data.copy_(given)


class TasScorer(Scorer):
    """score = bias - sum over query heads of weight * logit: TAS of weighted heads replays where TAS is large.

    Args:
        sample: inputs of the layer's gate. The first weights best predict how much the MLP's output changes from one
            frame to the next. scale: attention's own.
    """

    def __init__(self, sample: Sample, scale: float) -> None:
        super().__init__()
        self._scale = scale
        logits = self._logits(sample.query, sample.earlier)
        self._spread = float(logits.flatten(0, -2).std(0).mean().clamp(min=1e-12))
        weights = _regression(logits[:, 1:] / self._spread, _change(sample.y))
        self.heads = nn.Parameter(-weights * STEEPNESS / weights.abs().sum().clamp(min=1e-12))
        self.bias = nn.Parameter(torch.zeros(()))
        with torch.no_grad():
            scores = self.prepare(sample.query, sample.earlier, sample.x)
            self.bias -= _quantile(scores, FIRST_SHARE)

    def prepare(self, query: Tensor, earlier: Tensor, x: Tensor) -> Tensor:
        """Return the scores: they do not depend on decisions."""
        return self.bias - (self._logits(query, earlier) / self._spread) @ self.heads

    def score(self, prepared: Tensor, x: Tensor, cached: Tensor) -> Tensor:
        """Return the prepared scores."""
        return prepared

    def weights(self) -> Weights:
        """Return heads [Hq], float32. Their absolute values sum to 1, so that thresholds have the size of logits."""
        heads = self.heads.detach()
        return {"heads": (heads / heads.abs().sum().clamp(min=1e-12)).float().clone()}

    def threshold(self) -> float:
        """Return the threshold at which the gate with these heads decides as the scorer does."""
        return float(self.bias.detach() * self._spread / self.heads.detach().abs().sum().clamp(min=1e-12))

    def assign(self, weights: Weights, threshold: float) -> None:
        """Set heads and threshold. The scores get the size of an untrained gate's."""
        self.heads.data.copy_(weights["heads"] * STEEPNESS)
        self.bias.data.fill_(threshold * STEEPNESS / self._spread)

    def _logits(self, query: Tensor, earlier: Tensor) -> Tensor:
        return (query * earlier).sum(-1) * self._scale


def _quantile(scores: Tensor, share: float) -> Tensor:
    """Return a quantile. torch.quantile is limited to 16 million elements."""
    flat = scores.flatten()
    return flat.kthvalue(max(1, round(share * len(flat)))).values


def _change(outputs: Tensor) -> Tensor:
    """Return log ||y - y one frame earlier||, [N, n - 1, F], of y [N, n, F, H], at least a thousandth of the mean."""
    change = outputs.diff(dim=1).norm(dim=-1)
    return change.clamp(min=1e-3 * float(change.mean()) + 1e-12).log()


def _regression(inputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the least-squares weights [k] of inputs [..., k] for `wanted` [...], with a constant and a small ridge."""
    x, y = inputs.flatten(0, -2).double(), wanted.flatten().double()
    x, y = x - x.mean(0), y - y.mean()
    moments = x.T @ x / len(x)
    # Heads may be nearly dependent; the ridge keeps the system solvable.
    ridge = 1e-3 * moments.diagonal().mean().clamp(min=1e-12) * torch.eye(len(moments), dtype=x.dtype)
    return torch.linalg.solve(moments + ridge, x.T @ y / len(x)).float()
