"""Likelihood of token videos under a Hugging Face decoder, and under the plain copy of the frame before."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

HELD_OUT_SEED = 1
"""Of the videos that judge; training seeds start at 10 million."""


def load_decoder(path: Path) -> PreTrainedModel:
    """The decoder in a folder, float32, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()


def frame_nll(logits: Tensor, targets: Tensor, tokens_per_frame: int) -> Tensor:
    """Mean negative log-likelihood per frame, nats per token.

    Args:
        logits: float32 [N, T, V], row i predicts target i. targets: int64 [N, T], a whole number of frames.

    Returns:
        float32 [T / tokens_per_frame].
    """
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.reshape(len(targets), -1, tokens_per_frame).mean((0, 2))


def nll_by_frame(model: PreTrainedModel, tokens: np.ndarray, tokens_per_frame: int, batch: int = 4) -> Tensor:
    """Teacher-forced nats per token, float32 [frames], of videos int64 [N, 1 + T] that begin with one BOS."""
    total = torch.zeros((tokens.shape[1] - 1) // tokens_per_frame)
    with torch.inference_mode():
        for part in torch.from_numpy(tokens).split(batch):
            logits = model(part[:, :-1], use_cache=False).logits
            total += frame_nll(logits, part[:, 1:], tokens_per_frame) * len(part)
    return total / len(tokens)


def copy_nll(tokens: np.ndarray, tokens_per_frame: int, vocabulary: int) -> float:
    """Nats per token of the best "same symbol as one frame earlier" predictor over all frames but the first.

    It gives the earlier symbol the share of places where that is right, and the others the rest in equal parts.

    Args:
        tokens: int64 [N, 1 + T], BOS first. vocabulary: number of symbols.
    """
    now, before = tokens[:, 1 + tokens_per_frame :], tokens[:, 1:-tokens_per_frame]
    same = float((now == before).mean())
    if same in (0.0, 1.0):
        return 0.0 if same else math.log(vocabulary - 1)
    return -same * math.log(same) - (1 - same) * math.log((1 - same) / (vocabulary - 1))
