"""Continue recorded play: true frames in, then frames that the decoder makes under the recorded actions."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastcar_compile as fc
from common.worlds import Format, Play


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. `top_k` 1: the most likely one."""

    temperature: float = 1.0
    top_k: int = 40
    seed: int = 0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return image codes int64 [N, 1] drawn from their logits [N, codes]."""
    best, codes = logits.float().topk(sampling.top_k)
    drawn = torch.multinomial((best / sampling.temperature).softmax(-1), 1, generator=generator)
    return codes.gather(1, drawn)


def open_decoder(path: Path, world: Format, rows: int, frames: int, **options: Any) -> fc.Session:
    """Return a session of the decoder in a folder: `rows` plays of `frames` frames after a context.

    Args:
        options: those of `fc.compile`; default: float32, dense. As many threads decode as torch has.
    """
    longest = (world.context_frames + frames) * world.tokens_per_frame
    options = {"replay": None, "tokens_per_frame": world.tokens_per_frame, **options}
    with TemporaryDirectory() as folder:
        output = Path(folder) / "decoder"
        artifact = fc.compile(path, "cpu", batch_size=rows, max_seq_len=longest, output=output, **options)
        return artifact.session(threads=torch.get_num_threads())


def imagine(session: fc.Session, world: Format, context: Tensor, actions: Tensor, sampling: Sampling) -> np.ndarray:
    """Return the image codes int64 [B, F, image tokens] of frames after a context.

    Args:
        context: int64 [B, C * tokens per frame], whole frames. actions: int64 [B, F], tokens, one per frame to make.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    session.reset()
    session.prefill(context)
    made = []
    for action in actions.T:
        logits = session.step(action)
        for _ in range(world.tokens_per_frame - 1):
            made.append(choose(torch.as_tensor(logits)[:, : world.codes], sampling, generator))
            logits = session.step(made[-1][:, 0])
    return torch.cat(made, 1).reshape(len(context), -1, world.tokens_per_frame - 1).numpy()


def contexts_of(play: Play, world: Format, starts: np.ndarray, frames: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return the context, the actions and the true codes of sequences of a context and `frames` frames.

    Returns:
        int64 [N, context frames * tokens per frame], int64 [N, frames], int64 [N, frames, image tokens].
    """
    length = world.context_frames + frames
    tokens = play.take(starts, length).reshape(len(starts), -1, world.tokens_per_frame)
    context = torch.from_numpy(tokens[:, : world.context_frames].reshape(len(starts), -1))
    later = tokens[:, world.context_frames :]
    return context, torch.from_numpy(later[:, :, 0].copy()), later[:, :, 1:]
