"""Train a small decoder on the CPU. Every batch is fresh, so no video is seen twice. Resumable."""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from common.likelihood import HELD_OUT_SEED, nll_by_frame

WARM_UP = 0.03
FIRST_TRAINING_SEED = 10_000_000
"""Held-out seeds are far smaller."""

SAVE_SECONDS = 120.0
"""Least time between two checkpoints."""


@dataclass(frozen=True)
class World:
    """A source of videos.

    Attributes:
        make_tokens: (count, seed, frames) -> int64 [count, 1 + frames * tokens_per_frame], BOS first.
        frames: frames of a whole video.
    """

    make_tokens: Callable[[int, int, int], np.ndarray]
    tokens_per_frame: int
    frames: int

    def nll(self, model: PreTrainedModel, count: int) -> float:
        """Return the NLL of held-out videos in nats per token, without the first frame."""
        tokens = self.make_tokens(count, HELD_OUT_SEED, self.frames)
        return float(nll_by_frame(model.eval(), tokens, self.tokens_per_frame)[1:].mean())


@dataclass(frozen=True)
class Phase:
    """`steps` optimiser steps on `videos` videos of `frames` frames each."""

    frames: int
    videos: int
    steps: int


def build_optimizers(model: PreTrainedModel, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for embedding, head and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def learning_rate(progress: float, peak: float) -> float:
    """Return the rate at progress 0 to 1: a linear warm-up, then a cosine to 2 % of the peak."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    phase = min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * phase)))


def update(model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], tokens: Tensor) -> float:
    """Train one step on tokens int64 [N, 1 + T] and return the loss in nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


class Checkpoint:
    """Weights, optimiser state, step and log in one safetensors file. An interrupted run continues from it."""

    def __init__(self, path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._path, self._model, self._optimizers = path, model, optimizers
        self._saved = time.perf_counter()

    def load(self) -> tuple[int, list[dict]]:
        """Restore the state and return the steps done and the log; 0 and an empty log if there is no file."""
        if not self._path.exists():
            return 0, []
        tensors = load_file(self._path)
        weights = {name[2:]: t for name, t in tensors.items() if name.startswith("m/")}
        self._model.load_state_dict(weights, strict=True)
        for number, optimizer in enumerate(self._optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"o{number}/"):
                    _, index, key = name.split("/")
                    state.setdefault(int(index), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        log = json.loads(bytes(tensors["log"].tolist()))
        return int(tensors["step"]), log

    def save(self, step: int, log: list[dict], last: bool = False) -> None:
        """Save the state if SAVE_SECONDS have passed or it is the last. A kill while writing leaves the file before."""
        if not last and time.perf_counter() - self._saved < SAVE_SECONDS:
            return
        tensors = {f"m/{name}": t.detach().contiguous().clone() for name, t in self._model.state_dict().items()}
        for number, optimizer in enumerate(self._optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                tensors |= {f"o{number}/{index}/{key}": t.contiguous().clone() for key, t in values.items()}
        tensors["log"] = torch.tensor(list(json.dumps(log).encode()), dtype=torch.uint8)
        tensors["step"] = torch.tensor(step)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(self._path.name + ".part")
        save_file(tensors, scratch)
        os.replace(scratch, self._path)
        self._saved = time.perf_counter()


@dataclass(frozen=True)
class Plan:
    """A training: its phases, the seed of weights and data, the peak learning rate, and steps between evaluations."""

    phases: tuple[Phase, ...]
    seed: int
    rate: float
    every: int


def train(model: PreTrainedModel, world: World, plan: Plan, checkpoint: Path) -> list[dict]:
    """Train in place and return the log: an entry every `plan.every` steps, and a last one on 32 held-out videos.

    The schedule counts steps, not seconds: a busy machine trains longer, not worse.
    """
    optimizers = build_optimizers(model, plan.rate)
    kept = Checkpoint(checkpoint, model, optimizers)
    first, log = kept.load()
    schedule = [phase for phase in plan.phases for _ in range(phase.steps)]
    began, loss = time.perf_counter(), math.nan
    for step in range(first, len(schedule)):
        phase = schedule[step]
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate((step + 1) / len(schedule), plan.rate)
        tokens = world.make_tokens(phase.videos, FIRST_TRAINING_SEED * (plan.seed + 1) + step, phase.frames)
        loss = update(model.train(), optimizers, torch.from_numpy(tokens))
        if (step + 1) % plan.every == 0:
            _report(log, _entry(step + 1, phase, loss, world.nll(model, 8)), began)
        kept.save(step + 1, log)
    _report(log, _entry(len(schedule), schedule[-1], loss, world.nll(model, 32)), began)
    return log


def _entry(step: int, phase: Phase, loss: float, nll: float) -> dict:
    entry = {"step": step, "frames": phase.frames, "train_nll": round(loss, 5)}
    return {**entry, "held_out_nll_frames_2_to_8": round(nll, 5)}


def _report(log: list[dict], entry: dict, began: float) -> None:
    log.append(entry)
    print(f"{time.perf_counter() - began:7.0f} s  {entry}", flush=True)


@dataclass(frozen=True)
class Recipe:
    """How an example trains its decoder: the model, its videos, and the defaults of the command line."""

    build_model: Callable[[], PreTrainedModel]
    world: World
    phases: tuple[Phase, ...]
    rate: float


def train_command(description: str | None, folder: Path, recipe: Recipe) -> None:
    """Run the command line of an example's train.py; `folder` is the example's own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=folder / "model")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps of every phase")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data; another seed, other videos")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=recipe.rate, help="peak learning rate")
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--checkpoint", type=Path, help="default: OUT.checkpoint; deleted at the end")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = recipe.build_model()
    phases = tuple(Phase(p.frames, p.videos, round(p.steps * options.scale)) for p in recipe.phases)
    checkpoint = options.checkpoint or options.out.with_name(options.out.name + ".checkpoint")
    log = train(model, recipe.world, Plan(phases, options.seed, options.rate, options.every), checkpoint)
    model.save_pretrained(options.out)
    (options.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")
    checkpoint.unlink(missing_ok=True)
