"""Likelihood of token videos under a Hugging Face decoder, and under a copy of the previous frame."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

HELD_OUT_SEED = 1
"""Seed of the held-out videos. Training seeds start at 10 million."""


def load_decoder(path: Path) -> PreTrainedModel:
    """Return the decoder in a folder, float32, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()


def frame_nll(logits: Tensor, targets: Tensor, tokens_per_frame: int) -> Tensor:
    """Return the mean NLL of each frame in nats per token, float32 [T / tokens_per_frame].

    Args:
        logits: float32 [N, T, V]; row i predicts target i. targets: int64 [N, T], a whole number of frames.
    """
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.reshape(len(targets), -1, tokens_per_frame).mean((0, 2))


def nll_by_frame(model: PreTrainedModel, tokens: np.ndarray, tokens_per_frame: int, batch: int = 4) -> Tensor:
    """Return the teacher-forced NLL of each frame, float32 [frames], for videos int64 [N, 1 + T] with one BOS first."""
    total = torch.zeros((tokens.shape[1] - 1) // tokens_per_frame)
    with torch.inference_mode():
        for part in torch.from_numpy(tokens).split(batch):
            logits = model(part[:, :-1], use_cache=False).logits
            total += frame_nll(logits, part[:, 1:], tokens_per_frame) * len(part)
    return total / len(tokens)


def copy_nll(tokens: np.ndarray, tokens_per_frame: int, vocabulary: int) -> float:
    """Return the NLL of the predictor "same symbol as one frame earlier", without the first frame, in nats per token.

    Its probability of the earlier symbol is the share of tokens where that is right. The others share the rest equally.

    Args:
        tokens: int64 [N, 1 + T], BOS first. vocabulary: number of symbols.
    """
    now, before = tokens[:, 1 + tokens_per_frame :], tokens[:, 1:-tokens_per_frame]
    same = float((now == before).mean())
    if same in (0.0, 1.0):
        return 0.0 if same else math.log(vocabulary - 1)
    return -same * math.log(same) - (1 - same) * math.log((1 - same) / (vocabulary - 1))
