"""A bound for gates: decisions that are optimised one by one on the videos that judge them.

A gate does not know these videos, so it can hardly do better. The result is a local optimum, found as
`fastcar_compile.train_gate` finds a gate, with one score for every token and layer.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fastcar_compile as fc
from fastcar_compile.frontend.model_facts import ModelFacts
from fastcar_compile.tune.training.relaxed import LearnedScorer, Relaxation, RelaxedDecoder, Sample, Scorer

HINDSIGHT_VIDEOS = 4
STEPS, RATE, SAY_EVERY = 300, 0.1, 20
NOISE, NOISE_ENDS = 0.3, 0.8
"""First noise on scores; share of the steps after which it is 0."""

SOFTNESS, SOFTNESS_FALLS = 0.5, 0.2
"""First softness of decisions; its factor at the end."""

EDGE = 3.0
"""Limit of the first scores, so that every decision can still change."""

PARTS = 2000
"""Parts of all scores by which the threshold rises until it reaches the target: the last frame may be incomplete."""

PRICE, PRICE_GAIN, SHORTFALL_GAIN = 2.0, 1.0, 60.0
"""As in `fastcar_compile.tune.training.train`, but steeper: every step has the same few videos."""


@dataclass(frozen=True)
class Found:
    """Hard decisions that reach the target: their share of t >= F in each layer, and the NLL in nats per token."""

    target: float
    replay: float
    layers: tuple[float, ...]
    nll: float
    nll_dense: float


class Hindsight(Scorer):
    """One score per token. The first scores are those of a trained gate on the dense decoder."""

    def __init__(self, gate: LearnedScorer, sample: Sample) -> None:
        super().__init__()
        with torch.no_grad():
            before = torch.cat([sample.x[:, :1], sample.x[:, :-1]], 1)
            scores = gate.score(gate.prepare(sample.query, sample.earlier, sample.x), sample.x, before)
        self.scores = nn.Parameter(scores.clamp(-EDGE, EDGE))
        self.threshold_now = 0.0

    def prepare(self, query: Tensor, earlier: Tensor, x: Tensor) -> Tensor:
        """Return the scores."""
        return self.scores

    def score(self, prepared: Tensor, x: Tensor, cached: Tensor) -> Tensor:
        """Return the scores of one frame, less the threshold."""
        return prepared - self.threshold_now

    def weights(self) -> dict[str, Tensor]:
        """Return nothing: the scores fit these videos only."""
        return {}

    def threshold(self) -> float:
        """Return the threshold at which the decisions reach the target."""
        return self.threshold_now

    def assign(self, weights: dict[str, Tensor], threshold: float) -> None:
        """Do nothing: a trained gate's weights do not apply."""


def hindsight(
    model: nn.Module, gate: fc.TrainedGate, videos: np.ndarray, target: float, say: Callable[[str], None]
) -> Found:
    """Return the best decisions found at the target on videos int64 [N, T], starting from a gate `learned`."""
    tokens = torch.from_numpy(np.ascontiguousarray(videos))
    fed = tokens[:, :-1]
    frame = ModelFacts.of(model).tokens_per_frame
    assert frame is not None
    decoder = RelaxedDecoder(model, len(tokens), fed.shape[1], frame)
    scorers = [Hindsight(_scorer(gate, layer, s), s) for layer, s in enumerate(decoder.samples(fed))]
    first = decoder.prompt - 1 + decoder.frame
    dense = torch.log_softmax(decoder.dense(fed)[:, first:], -1)
    targets = tokens[:, first + 1 :, None]
    nll_dense = float(-dense.gather(-1, targets).mean())
    optimizer = torch.optim.Adam([p for s in scorers for p in s.parameters()], lr=RATE)
    random, price, best = torch.Generator().manual_seed(0), PRICE, None
    for number in range(STEPS):
        progress = number / STEPS
        noise = NOISE * max(0.0, 1 - progress / NOISE_ENDS)
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * progress))
        logits, shares = decoder.replayed(fed, scorers, Relaxation(noise, random, SOFTNESS * SOFTNESS_FALLS**progress))
        now = torch.log_softmax(logits[:, first:], -1)
        divergence = (dense.exp() * (dense - now)).sum(-1).mean()
        short = target - shares.mean()
        loss = divergence / nll_dense + max(0.0, price + SHORTFALL_GAIN * float(short.detach())) * short
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        price = max(0.0, price + PRICE_GAIN * float(short.detach()))
        if number % SAY_EVERY and number + 1 < STEPS:
            continue
        found = _hard(decoder, fed, targets, scorers, target, nll_dense)
        reached = f"replay {found.replay:.1%}, NLL {found.nll / nll_dense:.3f} of dense"
        say(f"hindsight, step {number + 1} of {STEPS}: {reached}")
        if best is None or found.nll < best.nll:
            best = found
    assert best is not None
    return best


def _scorer(gate: fc.TrainedGate, layer: int, sample: Sample) -> LearnedScorer:
    weights = gate.layers[layer]
    scorer = LearnedScorer(sample, len(weights["b1"]), torch.Generator().manual_seed(0))
    scorer.assign(dict(weights), gate.thresholds[layer])
    return scorer


@torch.no_grad()
def _hard(
    decoder: RelaxedDecoder, fed: Tensor, targets: Tensor, scorers: Sequence[Hindsight], target: float, nll_dense: float
) -> Found:
    """Return hard decisions under the least common threshold that reaches the target."""
    first = decoder.prompt - 1 + decoder.frame
    scores = torch.cat([s.scores.flatten() for s in scorers]).sort().values
    logits, shares = fed, torch.zeros(1)
    for index in range(math.ceil(target * len(scores)) - 1, len(scores), len(scores) // PARTS):
        for scorer in scorers:
            scorer.threshold_now = float(scores[index])
        logits, shares = decoder.replayed(fed, scorers)
        if float(shares.mean()) >= target:
            break
    for scorer in scorers:
        scorer.threshold_now = 0.0
    nll = float(-torch.log_softmax(logits[:, first:], -1).gather(-1, targets).mean())
    return Found(target, float(shares.mean()), tuple(shares.tolist()), nll, nll_dense)


def save(found: list[Found], path: Path) -> None:
    """Write results as JSON."""
    path.write_text(json.dumps([asdict(f) for f in found], indent=1, sort_keys=True) + "\n", "utf-8")


def load(path: Path) -> list[Found]:
    """Return the results of a file written by `save`."""
    return [Found(**(f | {"layers": tuple(f["layers"])})) for f in json.loads(path.read_text("utf-8"))]
