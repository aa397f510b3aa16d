"""Likelihood of held-out videos."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
from common import likelihood
from common.likelihood import HELD_OUT_SEED, load_decoder
from torch import Tensor
from transformers import PreTrainedModel
from video import TOKENS_PER_FRAME, tokenize, with_bos

MODEL = Path(__file__).parent / "model"


def load_model(path: Path = MODEL) -> PreTrainedModel:
    """Return the shipped decoder, float32, in evaluation mode."""
    return load_decoder(path)


def frame_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean NLL of each frame in nats per token, for logits float32 [N, T, V] and targets int64 [N, T]."""
    return likelihood.frame_nll(logits, targets, TOKENS_PER_FRAME)


def teacher_forced_nll(model: PreTrainedModel, videos: np.ndarray) -> float:
    """Return the NLL over frames 2-8 of videos uint8 [N, 8, 32, 32] in nats per token."""
    by_frame = likelihood.nll_by_frame(model, with_bos(tokenize(videos)), TOKENS_PER_FRAME)
    return float(by_frame[1:].mean())


__all__ = ["HELD_OUT_SEED", "MODEL", "frame_nll", "load_model", "teacher_forced_nll"]
