"""Fine-tuning for replay: a decoder and its gate are trained together."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from fastcar_compile.errors import InputError
from fastcar_compile.support.values import checked, number
from fastcar_compile.tune.training.train import Options, Say, Setup, begun, run
from fastcar_compile.tune.training.trained import TrainedGate


@checked()
@dataclass(frozen=True, eq=False, config=ConfigDict(arbitrary_types_allowed=True))
class TunedDecoder:
    """Result of `tune_decoder`.

    Attributes:
        model: a copy of the decoder with new weights, in evaluation mode.
        gate: trained with the model. Calibrate its thresholds afterwards.
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
    counted: tuple[int, int] | None = None,
    start: TrainedGate | None = None,
    softness: float = 0.5,
    checkpoint: str | Path | None = None,
    progress: Say | None = None,
) -> TunedDecoder:
    """Train a decoder together with its gate, so that it predicts well when MLPs replay.

    The loss is that of `train_gate` plus the dense decoder's own NLL. The decoder learns to need its MLPs at few
    tokens, as quantisation-aware training moves weights to values that round well. Deterministic for a seed, a PyTorch
    version and a number of threads.

    Args:
        model: a decoder, as `compile` takes it, float32. It is not changed.
        videos: int64 [N, T], prompt included, like the decoder's training videos, not the videos that judge the result.
            The decoder memorises a small set: `steps * batch` videos are best.
        rate: peak learning rate of the decoder's weights (Adam).
        start: a gate that was trained for the unchanged decoder.
        gate, target_replay, units, steps, batch, seed: as for `train_gate`.
        tokens_per_frame, prompt, counted, softness, checkpoint, progress: as for `train_gate`.

    Raises:
        InputError: bad arguments or videos.
        CompileError: the model cannot be captured.
    """
    rate = number("rate", rate, "give a number above 0")
    if not 0 < rate < math.inf:
        raise InputError(f"rate is {rate:g}", hint="give a number above 0")
    begin = begun(start)
    options = Options(gate, target_replay, units, steps, batch, seed, softness, begin, rate, counted)
    setup = Setup(tokens_per_frame, prompt, start, checkpoint, progress)
    training = run(model, videos, options, setup)
    tuned = copy.deepcopy(model).eval()
    own = dict(tuned.named_parameters())
    with torch.no_grad():
        for name, weight in training.weights.items():
            own[name].copy_(weight)
    return TunedDecoder(tuned, training.result())
