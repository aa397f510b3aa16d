"""Continue recorded play: 16 true frames in, then frames that the decoder makes under the recorded actions."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from decoder import TokenSplit
from torch import Tensor
from world_format import CODES, CONTEXT_FRAMES, GRID, TOKENS_PER_FRAME

import fastcar_compile as fc


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


def open_decoder(path: Path, rows: int, frames: int) -> fc.Session:
    """Return a session of the decoder in a folder: float32, dense, `rows` plays of `frames` frames after a context."""
    options: dict[str, Any] = {"batch_size": rows, "max_seq_len": (CONTEXT_FRAMES + frames) * TOKENS_PER_FRAME}
    options["tokens_per_frame"] = TOKENS_PER_FRAME
    with TemporaryDirectory() as folder:
        return fc.compile(path, "cpu", replay=None, output=Path(folder) / "decoder", **options).session()


def imagine(session: fc.Session, context: Tensor, actions: Tensor, sampling: Sampling) -> np.ndarray:
    """Return the image codes int64 [B, F, 64] of frames after a context.

    Args:
        context: int64 [B, C * 65], whole frames. actions: int64 [B, F], action tokens, one per frame to make.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    session.reset()
    session.prefill(context)
    made = []
    for action in actions.T:
        logits = session.step(action)
        for _ in range(GRID * GRID):
            made.append(choose(torch.as_tensor(logits), sampling, generator))
            logits = session.step(made[-1][:, 0])
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
