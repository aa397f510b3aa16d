"""What TAS promises, measured directly: does an MLP's output change less where the score is high?"""

from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.tune.training.relaxed import RelaxedDecoder, Sample
from replay_doom.sequences import KINDS, RICH, spaced
from replay_doom.setup import TOKENS_PER_FRAME, Decoder, Setup

ROWS = 4
"""Sequences that are computed together."""

_TINY = 1e-12
Scores = dict[str, np.ndarray]


def similarity(setup: Setup, decoder: Decoder) -> dict[str, Any]:
    """Return kind of motion -> layer by layer: change of MLP outputs, and rank correlations of three scores with it.

    All is measured on the dense decoder, between a frame and the one before. A change is |y - y before| / |y|. A score
    that predicts it perfectly has a correlation of 1; the sign of TAS is turned, because TAS replays where it is large.
    """
    counts, tokens = setup.counts, setup.tokens("held_out")
    starts = spaced(tokens, counts.precision, counts.frames, RICH)
    sequences = torch.from_numpy(tokens.take(starts, counts.frames))
    heads = fc.TrainedGate.load(setup.dense.gate_file("tas")).heads()
    kinds = tokens.kinds[starts[:, None] + np.arange(counts.prompt, counts.frames)][:, 2:]
    model, prompt = decoder.model(), counts.prompt * TOKENS_PER_FRAME
    found: list[list[Scores]] = []
    for part in sequences.split(ROWS):
        relaxed = RelaxedDecoder(model, len(part), part.shape[1] - 1, TOKENS_PER_FRAME, prompt)
        parts = zip(relaxed.samples(part[:, :-1]), relaxed.scales, strict=True)
        found.append([_scores(sample, scale, heads, layer) for layer, (sample, scale) in enumerate(parts)])
    layers = [
        {name: np.concatenate([p[name] for p in parts]) for name in parts[0]} for parts in zip(*found, strict=True)
    ]
    chosen = {name: kinds == index for index, name in enumerate(KINDS)} | {"all": kinds >= 0}
    return {name: [_summary(layer, frames) for layer in layers] for name, frames in chosen.items()}


def _joined(parts: tuple[Scores, ...]) -> Scores:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _scores(sample: Sample, scale: float, heads: Any, layer: int) -> Scores:
    """Return scores and output changes of frames 2 and later, [N, n - 1, F]; the last token is never read."""
    logits = (sample.query * sample.earlier).sum(-1)[:, 1:] * scale
    weights = torch.zeros(logits.shape[-1])
    for head, weight in (heads[layer] if heads else {}).items():
        weights[head] = weight
    scores = {
        "tas, mean of heads": -logits.mean(-1),
        "tas, trained heads": -(logits @ weights),
        "input change": _change(sample.x),
        "output change": _change(sample.y),
    }
    return {name: values[:, :, :-1].numpy() for name, values in scores.items()}


def _change(values: Tensor) -> Tensor:
    """Return |v - v one frame earlier| / |v|, [N, n - 1, F], of [N, n, F, H]."""
    return values.diff(dim=1).norm(dim=-1) / values[:, 1:].norm(dim=-1).clamp(min=_TINY)


def _summary(layer: Scores, chosen: np.ndarray) -> dict[str, float]:
    """Return the median output change, and the rank correlation of every score with it, on the chosen frames [N, n]."""
    if not chosen.any():
        return {}
    change = layer["output change"][chosen].ravel()
    found = {"output change": float(np.median(change))}
    for name in ("tas, mean of heads", "tas, trained heads", "input change"):
        correlation: Any = spearmanr(layer[name][chosen].ravel(), change)
        found[name] = float(correlation.statistic)
    return found
