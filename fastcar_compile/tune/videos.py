"""What calibration and training ask of videos: their length, their tokens, and a likelihood to measure against."""

import math

import numpy as np
import torch

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.tune.rule import counts


def check_tokens(videos: np.ndarray, config: DecoderConfig, prompt: int, counted: tuple[int, int] | None) -> None:
    """Raise InputError for a token of videos int64 [N, T] that the decoder cannot read, or that counts without a logit.

    Args:
        prompt: tokens that nothing predicts. counted: as of `counts`.
    """
    predicted = counts(torch.from_numpy(videos), counted).numpy()
    predicted[:, :prompt] = False
    known, logits = config.token_ids or 0, config.vocab_size or 0
    limits = np.where(predicted, min(known, logits), known)
    wrong = np.argwhere((videos < 0) | (videos >= limits))
    if len(wrong):
        video, place = wrong[0]
        limit, more = limits[video, place], f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        what = f"token {videos[video, place]} at place {place} of video {video}{more}: not in the vocabulary of {limit}"
        raise InputError(what, hint=f"use ids 0 .. {limit - 1}; videos and places are counted from 0")


def too_short(tokens: int, prompt: int, frame: int, frames: int, more: int) -> InputError:
    """Return the error of videos that hold too few tokens."""
    needed = prompt + frames * frame + more
    parts = f"a prompt of {prompt}, {count_text(frames, 'frame')} of {frame}, and {more} more, as the last token is "
    what = f"videos of {count_text(tokens, 'token')} are too short; {needed} are needed: {parts}predicted but not read"
    return InputError(what, hint=f"give videos of at least {needed} tokens, or another prompt or tokens_per_frame")


def check_dense(nll: float) -> float:
    """Return the dense NLL in nats per token. Raise InputError where no loss can be measured against it."""
    if 0 < nll < math.inf:
        return nll
    why = "its logits rule a token out, or are not numbers" if nll else "it predicts each token with certainty"
    what = f"the dense decoder's NLL on these videos is {nll:g}: {why}"
    raise InputError(what, hint="give other videos, or other ids that count, or look at the decoder's logits")
