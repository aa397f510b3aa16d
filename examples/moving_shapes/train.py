"""Train the moving-shapes decoder on the CPU; every batch is fresh, so nothing is seen twice."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from evaluate import HELD_OUT_SEED, teacher_forced_nll
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from video import BOS, FRAMES, TOKENS_PER_FRAME, TOKENS_PER_VIDEO, VOCAB_SIZE, make_videos, tokenize, with_bos

WARM_UP = 0.03
FIRST_TRAINING_SEED = 10_000_000
"""Held-out seeds lie far below."""


@dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps on `videos` videos of `frames` frames each."""

    frames: int
    videos: int
    steps: int


PHASES = (Phase(4, 8, 1800), Phase(FRAMES, 4, 400))
"""Motion is learnt on short videos, where attention is cheap; the whole length comes at the end."""


def build_model() -> LlamaForCausalLM:
    """The decoder: hidden 128, intermediate 352, 4 layers, 4 heads."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS_PER_VIDEO + 1,
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        dtype="float32",
    )
    config.tokens_per_frame = TOKENS_PER_FRAME
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding, head and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then cosine to 2 % of the peak; progress in [0, 1]."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    phase = min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * phase)))


def update(model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], tokens: torch.Tensor) -> float:
    """One step on tokens int64 [N, 1 + T]; returns the loss in nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def train(model: LlamaForCausalLM, phases: tuple[Phase, ...], seed: int, rate: float, every: int) -> list[dict]:
    """Train in place and return the log, one entry per `every` steps and a last one on 32 held-out videos.

    The schedule counts steps, not seconds, so that a busy machine trains longer, not worse.
    """
    optimizers = build_optimizers(model, rate)
    held_out = make_videos(8, HELD_OUT_SEED)
    schedule = [phase for phase in phases for _ in range(phase.steps)]
    began, log = time.perf_counter(), []
    for step, phase in enumerate(schedule):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate((step + 1) / len(schedule), rate)
        videos = make_videos(phase.videos, FIRST_TRAINING_SEED * (seed + 1) + step, phase.frames)
        loss = update(model.train(), optimizers, torch.from_numpy(with_bos(tokenize(videos))))
        if (step + 1) % every == 0:
            _report(log, step + 1, phase, loss, teacher_forced_nll(model.eval(), held_out), began)
    last = teacher_forced_nll(model.eval(), make_videos(32, HELD_OUT_SEED))
    _report(log, len(schedule), schedule[-1], loss, last, began)
    return log


def _report(log: list[dict], step: int, phase: Phase, loss: float, nll: float, began: float) -> None:
    entry = {"step": step, "frames": phase.frames, "train_nll": round(loss, 5)}
    log.append({**entry, "held_out_nll_frames_2_to_8": round(nll, 5)})
    print(f"{time.perf_counter() - began:7.0f} s  {log[-1]}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps of every phase")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data; another seed, other videos")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1.5e-2, help="peak learning rate")
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = build_model()
    phases = tuple(Phase(p.frames, p.videos, round(p.steps * options.scale)) for p in PHASES)
    log = train(model, phases, options.seed, options.rate, options.every)
    model.save_pretrained(options.out)
    (options.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
