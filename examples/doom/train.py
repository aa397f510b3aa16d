"""Train the decoder on tokenised frames. Open-ended and resumable.

The rate stays at its peak until the last `--cooldown` steps. Without them, training may go on from the same checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
import torch
from autoencoder import load_autoencoder
from common.progress import Log
from common.training import Checkpoint, build_optimizers
from data import SPLITS
from decoder import SCENARIOS, TokenSplit, build_model, load_tokens, tokenize_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Qwen3ForCausalLM
from world_format import CODES, CONTEXT_FRAMES, TOKENS_PER_FRAME

WARM_UP_STEPS = 100
AVERAGE = 0.995
"""Decay of the exponential average of the weights. The average is what is evaluated and exported."""

NOISE = 0.08
"""Largest share of wrong image tokens in a frame of context. Generated frames have wrong tokens too."""

IGNORED = -100
"""Target without a loss."""


def learning_rate(step: int, plan: Plan) -> float:
    """Return the rate of a step: linear warm-up, constant, and linear to zero over the last `cooldown` steps."""
    left = (plan.steps - step) / plan.cooldown if plan.cooldown else 1.0
    return plan.rate * min(1.0, (step + 1) / WARM_UP_STEPS, left)


@dataclass(frozen=True)
class Plan:
    """A training: its last step, the steps of its cooldown, sequences per step, peak rate, and steps per evaluation."""

    steps: int
    cooldown: int
    batch: int
    rate: float
    every: int
    seed: int


def noisy(tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return tokens int64 [N, T] with some image tokens replaced by others of the batch.

    The share of wrong tokens is drawn for each frame, from 0 to NOISE.
    """
    frames = tokens.reshape(len(tokens), -1, TOKENS_PER_FRAME)
    share = rng.uniform(0, NOISE, (*frames.shape[:2], 1))
    wrong = (rng.random(frames.shape) < share) & (frames < CODES)
    others = rng.choice(frames[frames < CODES], frames.shape)
    return np.where(wrong, others, frames).reshape(tokens.shape)


def targets_of(tokens: Tensor) -> Tensor:
    """Return the next tokens int64 [N, T - 1] of tokens [N, T]; actions and the first frame are IGNORED."""
    targets = tokens[:, 1:].clone()
    targets[targets >= CODES] = IGNORED
    targets[:, : TOKENS_PER_FRAME - 1] = IGNORED
    return targets


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean NLL of the targets that count, in nats per image token."""
    logits = model(inputs, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@torch.inference_mode()
def held_out_nll(model: nn.Module, split: TokenSplit, count: int) -> float:
    """Return the NLL of `count` evenly spaced held-out sequences in nats per image token, without their first frame."""
    starts = split.sequences(CONTEXT_FRAMES)
    chosen = starts[np.linspace(0, len(starts) - 1, count).astype(np.int64)]
    losses = []
    for part in torch.from_numpy(split.take(chosen, CONTEXT_FRAMES)).split(4):
        losses.append(token_loss(model.eval(), part[:, :-1], targets_of(part)) * len(part))
    return float(torch.stack(losses).sum() / count)


class Trainer:
    """The decoder, its averaged copy, their optimisers and checkpoint."""

    def __init__(self, plan: Plan, checkpoint: Path) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.model = build_model()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE))
        self.optimizers = build_optimizers(self.model, plan.rate)
        both = nn.ModuleDict({"model": self.model, "average": self.average})
        self.checkpoint = Checkpoint(checkpoint, both, self.optimizers)
        self.first, _ = self.checkpoint.load()

    def update(self, step: int, split: TokenSplit, starts: np.ndarray) -> float:
        """Train one step and return its loss."""
        rng = np.random.default_rng([self.plan.seed, step])
        tokens = split.take(rng.choice(starts, self.plan.batch), CONTEXT_FRAMES)
        targets = targets_of(torch.from_numpy(tokens))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, self.plan)
        loss = token_loss(self.model.train(), torch.from_numpy(noisy(tokens, rng))[:, :-1], targets)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.update_parameters(self.model)
        return loss.item()

    def run(self, split: TokenSplit, held_out: TokenSplit, log: Log) -> None:
        """Train until the plan's last step."""
        starts = split.sequences(CONTEXT_FRAMES)
        began, seen = time.perf_counter(), []
        for step in range(self.first, self.plan.steps):
            seen.append(self.update(step, split, starts))
            if (step + 1) % self.plan.every == 0 or step + 1 == self.plan.steps:
                values = {"train_nll": float(np.mean(seen)), "held_out_nll": held_out_nll(self.average, held_out, 20)}
                log.append(step + 1, values, time.perf_counter() - began)
                seen = []
            self.checkpoint.save(step + 1, [])

    def averaged(self) -> Qwen3ForCausalLM:
        """Return a decoder with the averaged weights."""
        weights = self.average.state_dict()
        del weights["n_averaged"]
        model = build_model()
        model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in weights.items()})
        return model


def prepare(options: argparse.Namespace) -> tuple[TokenSplit, TokenSplit]:
    """Tokenise what is not tokenised yet and return the splits of training and evaluation."""
    autoencoder = load_autoencoder(options.tokenizer)
    for split in SPLITS:
        if (options.data / split).is_dir():
            tokenize_split(autoencoder, options.data, split)
    return load_tokens(options.data, "train", SCENARIOS), load_tokens(options.data, "held_out", SCENARIOS)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/doom/data"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/doom/tokenizer.safetensors"))
    parser.add_argument("--out", type=Path, default=Path("build/doom/decoder"))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--cooldown", type=int, default=0, help="last steps, in which the rate falls to zero")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 16 frames per step")
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--snapshot", action="store_true", help="do not train: write the checkpoint's weights to OUT")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = Plan(options.steps, options.cooldown, options.batch, options.rate, options.every, options.seed)
    trainer = Trainer(plan, options.out.with_name(options.out.name + ".checkpoint"))
    if not options.snapshot:
        log = Log(options.out.with_name(options.out.name + ".jsonl"), trainer.first)
        trainer.run(*prepare(options), log)
    trainer.averaged().save_pretrained(options.out)


if __name__ == "__main__":
    main()
