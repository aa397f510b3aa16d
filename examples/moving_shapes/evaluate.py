"""Likelihood of held-out videos."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM
from video import TOKENS_PER_FRAME, tokenize, with_bos

HELD_OUT_SEED = 1
"""Training seeds start at 10 million."""

MODEL = Path(__file__).parent / "model"


def load_model(path: Path = MODEL) -> LlamaForCausalLM:
    """The shipped decoder, float32, in evaluation mode."""
    return LlamaForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()


def frame_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood per frame, nats per token.

    Args:
        logits: float32 [N, T, V], row i predicts target i. targets: int64 [N, T], a whole number of frames.

    Returns:
        float32 [T / 256].
    """
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.reshape(len(targets), -1, TOKENS_PER_FRAME).mean((0, 2))


def teacher_forced_nll(model: LlamaForCausalLM, videos: np.ndarray, batch: int = 4) -> float:
    """Nats per token over frames 2-8 of videos uint8 [N, 8, 32, 32], which the model has not seen."""
    tokens = torch.from_numpy(with_bos(tokenize(videos)))
    total = 0.0
    with torch.inference_mode():
        for part in tokens.split(batch):
            logits = model(part[:, :-1], use_cache=False).logits
            total += float(frame_nll(logits, part[:, 1:])[1:].mean()) * len(part)
    return total / len(tokens)
