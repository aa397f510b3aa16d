"""Continue recorded play: 16 true frames in, then frames that the decoder makes under the recorded actions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from decoder import TokenSplit
from torch import Tensor
from transformers import PreTrainedModel
from world_format import CODES, CONTEXT_FRAMES, GRID, TOKENS_PER_FRAME


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. `top_k` 1: the most likely one."""

    temperature: float = 1.0
    top_k: int = 40
    seed: int = 0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return image codes int64 [N, 1] drawn from logits [N, 1024]."""
    best, codes = logits[:, :CODES].float().topk(sampling.top_k)
    drawn = torch.multinomial((best / sampling.temperature).softmax(-1), 1, generator=generator)
    return codes.gather(1, drawn)


@torch.inference_mode()
def imagine(model: PreTrainedModel, context: Tensor, actions: Tensor, sampling: Sampling) -> np.ndarray:
    """Return the image codes int64 [N, F, 64] of frames after a context.

    Args:
        context: int64 [N, C * 65], whole frames. actions: int64 [N, F], action tokens, one per frame to make.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    output = model(context, use_cache=True)
    made = []
    for action in actions.T:
        token = action[:, None]
        for _ in range(GRID * GRID):
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            token = choose(output.logits[:, -1], sampling, generator)
            made.append(token)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
    return torch.cat(made, 1).reshape(len(context), -1, GRID * GRID).numpy()


def contexts_of(split: TokenSplit, starts: np.ndarray, frames: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return the context, the actions and the true codes of sequences of 16 + `frames` frames.

    Returns:
        int64 [N, 1040], int64 [N, frames], int64 [N, frames, 64].
    """
    tokens = split.take(starts, CONTEXT_FRAMES + frames).reshape(len(starts), -1, TOKENS_PER_FRAME)
    context = torch.from_numpy(tokens[:, :CONTEXT_FRAMES].reshape(len(starts), -1))
    later = tokens[:, CONTEXT_FRAMES:]
    return context, torch.from_numpy(later[:, :, 0].copy()), later[:, :, 1:]
