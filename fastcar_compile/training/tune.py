"""Fine-tuning for replay: a decoder and its gate, trained together."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastcar_compile.errors import InputError
from fastcar_compile.training.train import Options, Say, run
from fastcar_compile.training.trained import TrainedGate


@dataclass(frozen=True, eq=False)
class TunedDecoder:
    """What `tune_decoder` gives.

    Attributes:
        model: a copy of the decoder with other weights, in evaluation mode.
        gate: trained with it; its thresholds are calibrated afterwards.
    """

    model: nn.Module
    gate: TrainedGate


def tune_decoder(
    model: nn.Module,
    videos: Any,
    *,
    gate: str = "learned",
    target_replay: float,
    rate: float = 1e-3,
    units: int = 16,
    steps: int = 400,
    batch: int = 4,
    seed: int = 0,
    tokens_per_frame: int | None = None,
    prompt: int = 1,
    start: TrainedGate | None = None,
    softness: float = 0.5,
    checkpoint: str | Path | None = None,
    progress: Say | None = None,
) -> TunedDecoder:
    """Train a decoder together with its gate, so that it predicts well where MLPs replay.

    The loss is that of `train_gate` and the dense decoder's own NLL: what computes may change, so the decoder learns to
    put what changes from frame to frame where it is computed, as quantisation-aware training moves weights to where
    they round well. Deterministic for a seed, a version of PyTorch and a number of threads.

    Args:
        model: a decoder, as `compile` takes it, float32; it is not changed.
        videos: int64 [N, T], prompt included: such as the decoder was trained on, never those that the result is
            judged by. Few videos are learnt by heart: `steps * batch` are best.
        rate: peak learning rate of the decoder's weights (Adam).
        start: a gate that was trained for the decoder as it is.
        gate, target_replay, units, steps, batch, seed, tokens_per_frame, prompt, softness, checkpoint, progress: as of
            `train_gate`.

    Raises:
        InputError: bad arguments or videos. CompileError: the model cannot be captured.
    """
    if not 0 < rate < math.inf:
        raise InputError(f"rate is {rate:g}", hint="give a number above 0")
    begin = start and start.inputs
    options = Options(gate, target_replay, units, steps, batch, seed, softness, begin, decoder_rate=rate)
    training = run(model, videos, options, tokens_per_frame, prompt, start, checkpoint, progress)
    tuned = copy.deepcopy(model).eval()
    own = dict(tuned.named_parameters())
    with torch.no_grad():
        for name, weight in training.weights.items():
            own[name].copy_(weight)
    return TunedDecoder(tuned, training.result())
