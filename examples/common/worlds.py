"""Train the decoder of a world on recorded play. Open-ended and resumable.

The rate stays at its peak until the last `--cooldown` steps. Without them, training may go on from the same checkpoint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.progress import Log
from common.training import Checkpoint, build_optimizers

WARM_UP_STEPS = 100
AVERAGE = 0.995
"""Decay of the exponential average of the weights. The average is what is evaluated and exported."""

NOISE = 0.08
"""Largest share of wrong image tokens in a frame of context. Generated frames have wrong tokens too."""

LONGEST_SESSION = 4096
"""Frames that `max_position_embeddings` allows."""

IGNORED = -100
"""Target without a loss."""


@dataclass(frozen=True)
class Format:
    """Tokens below `codes` are those of images; a frame is an action's token and its image tokens."""

    codes: int
    tokens_per_frame: int
    context_frames: int
    """Frames that the decoder sees, and of a start."""

    def noisy(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return tokens int64 [N, T] with some image tokens replaced by others of the batch.

        The share of wrong tokens is drawn for each frame, from 0 to NOISE.
        """
        frames = tokens.reshape(len(tokens), -1, self.tokens_per_frame)
        share = rng.uniform(0, NOISE, (*frames.shape[:2], 1))
        wrong = (rng.random(frames.shape) < share) & (frames < self.codes)
        others = rng.choice(frames[frames < self.codes], frames.shape)
        return np.where(wrong, others, frames).reshape(tokens.shape)

    def targets_of(self, tokens: Tensor) -> Tensor:
        """Return the next tokens int64 [N, T - 1] of tokens [N, T]; actions and the first frame are IGNORED."""
        targets = tokens[:, 1:].clone()
        targets[targets >= self.codes] = IGNORED
        targets[:, : self.tokens_per_frame - 1] = IGNORED
        return targets


@dataclass(frozen=True)
class Play:
    """Recorded play as tokens.

    Attributes:
        tokens: int16 [T, tokens per frame]: the action that led to the frame, then its image tokens in raster order.
        bounds: int64 [E, 2], first and one past the last frame of each episode.
    """

    tokens: np.ndarray
    bounds: np.ndarray

    def sequences(self, length: int) -> np.ndarray:
        """Return int64 [N]: every frame that begins `length` frames of one episode."""
        return np.concatenate([np.arange(first, max(first, end - length + 1)) for first, end in self.bounds])

    def take(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return int64 [N, length * tokens per frame]: the sequences that begin at `starts`."""
        frames = self.tokens[starts[:, None] + np.arange(length)]
        return frames.reshape(len(starts), -1).astype(np.int64)


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean NLL of the targets that count, in nats per image token."""
    # Only in training: with AMX it is several times as fast, and without it half as fast.
    amx = torch.backends.cpu.get_cpu_capability() != "DEFAULT" and torch.cpu._is_amx_tile_supported()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amx and model.training):
        logits = model(inputs, use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@torch.inference_mode()
def held_out_nll(model: nn.Module, world: Format, play: Play, count: int, frames: int) -> float:
    """Return the NLL of `count` evenly spaced held-out sequences in nats per image token, without their first frame."""
    starts = play.sequences(frames)
    chosen = starts[np.linspace(0, len(starts) - 1, count).astype(np.int64)]
    losses = []
    for part in torch.from_numpy(play.take(chosen, frames)).split(4):
        losses.append(token_loss(model.eval(), part[:, :-1], world.targets_of(part)) * len(part))
    return float(torch.stack(losses).sum() / count)


class Trainer:
    """The decoder, its averaged copy, their optimisers and checkpoint."""

    def __init__(self, build: Callable[[], Qwen3ForCausalLM], world: Format, plan: argparse.Namespace) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self._build, self._world = plan, build, world
        self.model = build()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE))
        self.optimizers = build_optimizers(self.model, plan.rate)
        both = nn.ModuleDict({"model": self.model, "average": self.average})
        self.checkpoint = Checkpoint(plan.out.with_name(plan.out.name + ".checkpoint"), both, self.optimizers)
        self.first, _ = self.checkpoint.load()

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step: linear warm-up, constant, and linear to zero over the last `cooldown` steps."""
        left = (self.plan.steps - step) / self.plan.cooldown if self.plan.cooldown else 1.0
        return self.plan.rate * min(1.0, (step + 1) / WARM_UP_STEPS, left)

    def update(self, step: int, play: Play, starts: np.ndarray) -> float:
        """Train one step and return its loss."""
        rng = np.random.default_rng([self.plan.seed, step])
        tokens = play.take(rng.choice(starts, self.plan.batch), self.plan.frames)
        targets = self._world.targets_of(torch.from_numpy(tokens))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = self.learning_rate(step)
        inputs = torch.from_numpy(self._world.noisy(tokens, rng))[:, :-1]
        loss = token_loss(self.model.train(), inputs, targets)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.update_parameters(self.model)
        return loss.item()

    def run(self, play: Play, held_out: Play, log: Log) -> None:
        """Train until the plan's last step."""
        frames = self.plan.frames
        starts = play.sequences(frames)
        began, seen = time.perf_counter(), []
        for step in range(self.first, self.plan.steps):
            seen.append(self.update(step, play, starts))
            if (step + 1) % self.plan.every == 0 or step + 1 == self.plan.steps:
                nll = held_out_nll(self.average, self._world, held_out, 20, frames)
                log.append(
                    step + 1, {"train_nll": float(np.mean(seen)), "held_out_nll": nll}, time.perf_counter() - began
                )
                seen = []
            self.checkpoint.save(step + 1, [], last=step + 1 == self.plan.steps)

    def averaged(self) -> Qwen3ForCausalLM:
        """Return a decoder with the averaged weights."""
        weights = self.average.state_dict()
        del weights["n_averaged"]
        model = self._build()
        model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in weights.items()})
        return model


def train_command(
    parser: argparse.ArgumentParser,
    build: Callable[[], Qwen3ForCausalLM],
    world: Format,
    prepare: Callable[[argparse.Namespace], tuple[Play, Play]],
) -> None:
    """Run the command line of a world's train.py. `parser` has --data, --out and what `prepare` wants.

    Args:
        prepare: the options -> play to train on, and held-out play.
    """
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--cooldown", type=int, default=0, help="last steps, in which the rate falls to zero")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--frames", type=int, default=16, help="of a sequence")
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--snapshot", action="store_true", help="do not train: write the checkpoint's weights to OUT")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer = Trainer(build, world, options)
    if not options.snapshot:
        log = Log(options.out.with_name(options.out.name + ".jsonl"), trainer.first)
        trainer.run(*prepare(options), log)
    trainer.averaged().save_pretrained(options.out)


def build_decoder(world: Format, vocab_size: int, layers: int, intermediate: int) -> Qwen3ForCausalLM:
    """Return the decoder of a world with random weights: 256 wide, every layer with a sliding window of its context.

    Four query heads share one key/value head. The window makes positions relative, so training needs fewer of them
    than a session has.
    """
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=LONGEST_SESSION * world.tokens_per_frame,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=True,
        sliding_window=world.context_frames * world.tokens_per_frame,
        layer_types=["sliding_attention"] * layers,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        dtype="float32",
    )
    config.tokens_per_frame = world.tokens_per_frame
    return Qwen3ForCausalLM(config)


def load_decoder(path: Path) -> Qwen3ForCausalLM:
    """Return the decoder in a folder, float32, in evaluation mode."""
    model = Qwen3ForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    return model.eval()
