"""Training of gates, end to end through the decoder: the least NLL increase at a target replay ratio.

Every step decodes a few videos, teacher-forced. Decisions are hard forwards and soft backwards (straight-through, with
logistic noise that fades). The loss is the divergence of the replaying decoder from the dense one, relative to the
dense NLL, plus a price on every forward that computes. The price follows the shortfall from the target. The decoder is
frozen, or trained with its gates (`tune`); then the dense NLL is part of the loss.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor, nn

from fastcar_compile.errors import InputError
from fastcar_compile.frontend.model_facts import ModelFacts
from fastcar_compile.support import values
from fastcar_compile.tune.calibrate import program_key
from fastcar_compile.tune.rule import counts
from fastcar_compile.tune.search import Say
from fastcar_compile.tune.training.relaxed import LearnedScorer, Relaxation, RelaxedDecoder, Sample, Scorer, TasScorer
from fastcar_compile.tune.training.trained import SAVE_EVERY, TrainedGate, TrainingState

RATES = {"learned": 5e-3, "tas": 2e-2}
"""Peak learning rates (Adam) after a short warm-up. They fall along a cosine to the floor."""

RATE_FLOOR, WARM_UP = 0.03, 10
"""Least rate relative to the peak; steps of the warm-up."""

NOISE_ENDS = 0.8
"""Share of the steps after which the noise on decisions, 1 at first, is 0."""

FURTHER_NOISE, SOFTNESS_FALLS = 0.6, 0.3
"""When a training continues from a gate: first noise and last softness, as shares of the first softness."""

FIRST_PRICE = 0.5
"""First price of replay in relative NLL. At 0.5, 10 % more replay may cost 5 % more NLL."""

PRICE_GAIN, SHORTFALL_GAIN = 0.3, 10.0
"""Gains of an augmented Lagrangian: the price grows with the sum of the shortfalls and with the latest one."""

TAIL = 0.1
"""Share of the steps, at the end, whose mean gives the result's own figures."""


_LARGEST_SEED = (1 << 63) - 1
"""Bits that torch's generator takes."""


@dataclass(frozen=True)
class Options:
    """Options that the result depends on, as `train_gate` takes them.

    Attributes:
        start: `TrainedGate.inputs` of the gate that the training starts from.
        decoder_rate: peak learning rate of the decoder's own weights; 0 freezes them.
        counted: ids of the tokens that the loss counts; None: all.
    """

    gate: str
    target: float
    units: int
    steps: int
    batch: int
    seed: int
    softness: float = 0.5
    start: str | None = None
    decoder_rate: float = 0.0
    counted: tuple[int, int] | None = None


@dataclass(frozen=True)
class Setup:
    """The rest of the arguments of `train_gate`, by their names there."""

    tokens_per_frame: int | None = None
    prompt: int = 1
    start: TrainedGate | None = None
    checkpoint: str | Path | None = None
    progress: Say | None = None


@dataclass(frozen=True)
class Step:
    """Measurements of one step: nats per token with and without replay, and the replayed share of each layer."""

    nll: float
    nll_dense: float
    shares: tuple[float, ...]

    @property
    def replay(self) -> float:
        """Mean of the layers' shares."""
        return sum(self.shares) / len(self.shares)


def train_gate(
    model: nn.Module,
    videos: Any,
    *,
    gate: str = "learned",
    target_replay: float,
    units: int = 16,
    steps: int = 200,
    batch: int = 4,
    seed: int = 0,
    tokens_per_frame: int | None = None,
    prompt: int = 1,
    counted: tuple[int, int] | None = None,
    start: TrainedGate | None = None,
    softness: float = 0.5,
    checkpoint: str | Path | None = None,
    progress: Say | None = None,
) -> TrainedGate:
    """Train the gates of all layers together. The decoder's weights stay. Calibrate the thresholds afterwards.

    Deterministic for a seed, a PyTorch version and a number of threads. docs/explanation/gates.md describes the method.

    Args:
        model: a decoder, as `compile` takes it, float32.
        videos: int64 [N, T], prompt included, not the videos that judge the result. No video is drawn again before all
            were drawn; `steps * batch` videos are best.
        gate: "learned" (a network on the MLP's input and its change), or "tas" (a weight per query head).
        target_replay: share of the forwards t >= F to replay, more than 0 and less than 1.
        units: size of the hidden layer of "learned".
        steps: steps of the optimiser. batch: videos per step.
        seed: of first weights, order of videos and noise.
        tokens_per_frame: default: the model's own.
        prompt: tokens before decoding starts.
        counted: the ids first .. end - 1 of the tokens that the decoder predicts, which the loss counts; others are
            given to it. Their forwards replay like any. None: all count.
        start: a gate of this kind, units and decoder to continue from, at half the rate and with decisions that are
            soft forwards too.
        softness: first softness of these decisions; it falls to 0.3 of that. Remaining softness makes the result's own
            figures too good.
        checkpoint: a file with the state, written regularly. An interrupted training continues from it.
        progress: called with one line after every step. The logger `fastcar_compile` has it too, at INFO.

    Raises:
        InputError: bad arguments or videos.
        CompileError: the model cannot be captured.
    """
    options = Options(gate, target_replay, units, steps, batch, seed, softness, counted=counted)
    return run(model, videos, options, Setup(tokens_per_frame, prompt, start, checkpoint, progress)).result()


@values.checked()
@pydantic_dataclass(frozen=True, eq=False, config=ConfigDict(arbitrary_types_allowed=True))
class TunedDecoder:
    """Result of `tune_decoder`.

    Attributes:
        model: a copy of the decoder with new weights, in evaluation mode.
        gate: trained with the model. Calibrate its thresholds afterwards.
    """

    model: nn.Module
    gate: TrainedGate


def tune_decoder(
    model: nn.Module,
    videos: Any,
    *,
    gate: str = "learned",
    target_replay: float,
    rate: float = 1e-3,
    units: int = 16,
    steps: int = 400,
    batch: int = 4,
    seed: int = 0,
    tokens_per_frame: int | None = None,
    prompt: int = 1,
    counted: tuple[int, int] | None = None,
    start: TrainedGate | None = None,
    softness: float = 0.5,
    checkpoint: str | Path | None = None,
    progress: Say | None = None,
) -> TunedDecoder:
    """Train a decoder together with its gate, so that it predicts well when MLPs replay.

    The loss is that of `train_gate` plus the dense decoder's own NLL. The decoder learns to need its MLPs at few
    tokens, as quantisation-aware training moves weights to values that round well. Deterministic for a seed, a PyTorch
    version and a number of threads.

    Args:
        model: a decoder, as `compile` takes it, float32. It is not changed.
        videos: int64 [N, T], prompt included, like the decoder's training videos, not the videos that judge the result.
            The decoder memorises a small set: `steps * batch` videos are best.
        rate: peak learning rate of the decoder's weights (Adam).
        start: a gate that was trained for the unchanged decoder.
        gate, target_replay, units, steps, batch, seed: as for `train_gate`.
        tokens_per_frame, prompt, counted, softness, checkpoint, progress: as for `train_gate`.

    Raises:
        InputError: bad arguments or videos.
        CompileError: the model cannot be captured.
    """
    rate = values.number("rate", rate, "give a number above 0")
    if not 0 < rate < math.inf:
        raise InputError(f"rate is {rate:g}", hint="give a number above 0")
    options = Options(gate, target_replay, units, steps, batch, seed, softness, decoder_rate=rate, counted=counted)
    training = run(model, videos, options, Setup(tokens_per_frame, prompt, start, checkpoint, progress))
    tuned = copy.deepcopy(model).eval()
    own = dict(tuned.named_parameters())
    with torch.no_grad():
        for name, weight in training.weights.items():
            own[name].copy_(weight)
    return TunedDecoder(tuned, training.result())


def run(model: nn.Module, videos: Any, options: Options, setup: Setup) -> Training:
    """Return a finished training. Arguments and errors are those of `train_gate`."""
    values.check_kind("model", model, nn.Module, "a decoder as `compile` takes it")
    values.check_kind("start", setup.start, (TrainedGate, type(None)), "a TrainedGate")
    say = values.reporter(setup.progress)
    options = dataclasses.replace(_checked(options), start=setup.start and setup.start.inputs)
    tokens = values.token_table("the videos", videos)
    prompt = values.whole("prompt", setup.prompt, 1)
    frame = frame_of(model, setup.tokens_per_frame)
    decoder = RelaxedDecoder(model, min(options.batch, len(tokens)), tokens.shape[1] - 1, frame, prompt)
    facts = {name: value for name, value in dataclasses.asdict(options).items() if name != "counted" or value}
    key = program_key(decoder.program, facts | {"prompt": prompt}, tokens)
    if not counts(torch.from_numpy(tokens[:, prompt + frame :]), options.counted).any():
        hint = "give the ids of the tokens that the decoder predicts"
        raise InputError(f"no token after the first frame has an id in {options.counted}", hint=hint)
    training = Training(decoder, torch.from_numpy(tokens), options, setup.start, key)
    checkpoint = None if setup.checkpoint is None else values.path_of("checkpoint", setup.checkpoint)
    training.run(TrainingState(checkpoint, key), say)
    return training


def frame_of(model: nn.Module, given: int | None) -> int:
    """Return the tokens of a frame: those that were given, or the model's own.

    Raises:
        InputError: the model does not say, or what was given is no number from 1 on.
    """
    frame = ModelFacts.of(model).tokens_per_frame if given is None else given
    if frame is None:
        raise InputError("the model does not say its tokens_per_frame", hint="give tokens_per_frame")
    return values.whole("tokens_per_frame", frame, 1)


def _checked(options: Options) -> Options:
    """Return the options with Python's numbers."""
    if not isinstance(options.gate, str) or options.gate not in SCORERS:
        what = f"gate {values.shown(options.gate)} has nothing to train"
        raise InputError(what, hint=f"choose from {', '.join(SCORERS)}")
    target = values.number("target_replay", options.target)
    if not 0 < target < 1:
        raise InputError(f"target_replay is {target:g}", hint="give a share between 0 and 1")
    softness = values.number("softness", options.softness)
    if not 0 < softness < math.inf:
        raise InputError(f"softness is {softness:g}", hint="give a number above 0")
    sizes = {name: values.whole(name, getattr(options, name), 1) for name in ("units", "steps", "batch")}
    seed, counted = values.whole("seed", options.seed, 0, _LARGEST_SEED), values.token_range("counted", options.counted)
    return dataclasses.replace(options, target=target, softness=softness, seed=seed, counted=counted, **sizes)


SCORERS: dict[str, Callable[[Sample, float, int, torch.Generator], Scorer]] = {
    "learned": lambda sample, scale, units, random: LearnedScorer(sample, units, random),
    "tas": lambda sample, scale, units, random: TasScorer(sample, scale),
}
"""Gates that can be trained -> a layer's scorer: of a sample, attention's scale, hidden units and random numbers."""


class Training:
    """Scorers, their optimiser and the price; with `decoder_rate` also the decoder's weights.

    Attributes:
        scorers: one per layer. weights: the trained weights of the decoder, by their names in the model. log: one entry
            per step. key: hash of everything that the training depends on.
    """

    def __init__(
        self, decoder: RelaxedDecoder, videos: Tensor, options: Options, start: TrainedGate | None = None, key: str = ""
    ) -> None:
        self._decoder, self._videos, self._options, self.key = decoder, videos, options, key
        random = torch.Generator().manual_seed(options.seed)
        # The first batch sets the scale of the inputs, and so the first weights.
        samples = decoder.samples(self._batch(0)[:, :-1])
        self.scorers = nn.ModuleList(self._made(samples, random))
        self._price, rate, self._soft = FIRST_PRICE, RATES[options.gate], start is not None
        if start is not None:
            self._go_on_from(start)
            rate /= 2
        self.weights = decoder.own_weights() if options.decoder_rate else {}
        weights = nn.ParameterList(self.weights.values())
        self._trained = nn.ModuleList([self.scorers, weights])
        parts = (*self._rates(rate), (weights, options.decoder_rate))
        self._groups = [{"params": list(part.parameters()), "peak": peak} for part, peak in parts if len(part)]
        self._optimizer = torch.optim.Adam(self._groups, betas=(0.9, 0.95))
        self.log: list[Step] = []

    def _made(self, samples: Sequence[Sample], random: torch.Generator) -> list[Scorer]:
        """Return the scorers of all layers with their first weights."""
        make, units = SCORERS[self._options.gate], self._options.units
        return [make(*pair, units, random) for pair in zip(samples, self._decoder.scales, strict=True)]

    def _rates(self, rate: float) -> list[tuple[nn.ModuleList | nn.ParameterList, float]]:
        """Return the parts of the scorers with their peak learning rates."""
        return [(self.scorers, rate)]

    def _go_on_from(self, start: TrainedGate) -> None:
        """Start from a trained gate. Raise InputError when its kind, units or decoder differ."""
        scorers, gate = self._list(), self._options.gate
        shapes = [{name: list(t.shape) for name, t in layer.items()} for layer in start.layers]
        wanted = [{name: list(t.shape) for name, t in scorer.weights().items()} for scorer in scorers]
        if start.gate != gate or shapes != wanted:
            what = f"the gate to start from is {start.gate!r} with {shapes}, not {gate!r} with {wanted}"
            raise InputError(what, hint="start from a gate of the same kind, units and decoder")
        for scorer, weights, threshold in zip(scorers, start.layers, start.thresholds, strict=True):
            scorer.assign(weights, threshold)
        self._price = start.price

    def run(self, kept: TrainingState, say: Say) -> None:
        """Run the remaining steps, from the saved state if there is one."""
        before = kept.load(self._trained, self._optimizer)
        if before is not None:
            self._price, self.log = before["price"], [Step(*entry) for entry in before["steps"]]
        count = self._options.steps
        for step_number in range(len(self.log), count):
            self.log.append(self._step(step_number))
            say(_line(self.log, count, self._price))
            if step_number % SAVE_EVERY == 0 or step_number + 1 == count:
                entries = [(s.nll, s.nll_dense, s.shares) for s in self.log]
                kept.save(self._trained, self._optimizer, {"price": self._price, "steps": entries})

    def _step(self, number: int) -> Step:
        options = self._options
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * _schedule(number, options.steps)
        found, loss, short = self._loss(self._batch(number), self._relaxation(number))
        self._optimizer.zero_grad()
        loss.backward()
        # The decoder's gradients are much larger in number, so each group has its own norm.
        for group in self._groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self._optimizer.step()
        # The price is the multiplier of the constraint. It never rewards less replay.
        self._price = max(0.0, self._price + PRICE_GAIN * short)
        return found

    def _relaxation(self, number: int) -> Relaxation:
        options = self._options
        progress = number / options.steps
        # The noise depends on the step's number alone, so a resumed training draws the same.
        random = torch.Generator().manual_seed(options.seed * options.steps + number)
        faded = max(0.0, 1 - progress / NOISE_ENDS)
        if not self._soft:
            return Relaxation(faded, random)
        softness = options.softness * SOFTNESS_FALLS**progress
        return Relaxation(FURTHER_NOISE * options.softness * faded, random, softness)

    def _loss(self, tokens: Tensor, relaxation: Relaxation) -> tuple[Step, Tensor, float]:
        """Return the measurements on videos [rows, T], the loss, and the shortfall of replay."""
        decoder = self._decoder
        first = decoder.prompt - 1 + decoder.frame
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        chosen = counts(targets, self._options.counted)
        later = chosen[:, first:]
        logits, shares = decoder.replayed(inputs, self._list(), relaxation)
        now = torch.log_softmax(logits[:, first:][later], -1)
        # The dense decoder is the teacher. It has a gradient only where its own weights are trained.
        every = torch.log_softmax(decoder.dense(inputs), -1)
        dense = every[:, first:][later].detach()
        wanted = targets[:, first:][later][:, None]
        nll, nll_dense = (float(-p.detach().gather(-1, wanted).mean()) for p in (now, dense))
        loss = (dense.exp() * (dense - now)).sum(-1).mean()
        if self.weights:
            decoded = chosen[:, decoder.prompt - 1 :]
            own = targets[:, decoder.prompt - 1 :][decoded][:, None]
            loss = loss - every[:, decoder.prompt - 1 :][decoded].gather(-1, own).mean()
        short = self._options.target - shares.mean()
        # The mean over all steps keeps one unusual batch from changing the price of replay.
        scale = float(np.mean([s.nll_dense for s in self.log] + [nll_dense]))
        price = max(0.0, self._price + SHORTFALL_GAIN * float(short.detach()))
        found = Step(nll, nll_dense, tuple(shares.detach().tolist()))
        return found, loss / scale + price * short, float(short.detach())

    def _batch(self, number: int) -> Tensor:
        """Return the videos of a step. Every pass over the videos has its own order."""
        count, rows = len(self._videos), self._decoder.rows
        per_pass = count // rows
        random = torch.Generator().manual_seed(self._options.seed + number // per_pass)
        # The order depends on the pass alone. Videos that fill no batch wait for another pass.
        order = torch.randperm(count, generator=random)
        start = number % per_pass * rows
        return self._videos[order[start : start + rows]]

    def result(self) -> TrainedGate:
        """Return the trained gate, with figures over the last steps."""
        last = self.log[-max(1, round(TAIL * len(self.log))) :]
        replay, nll, dense = (float(np.mean([getattr(s, n) for s in last])) for n in ("replay", "nll", "nll_dense"))
        layers, thresholds = zip(*((s.weights(), s.threshold()) for s in self._list()), strict=True)
        found = (self._options.target, replay, nll, dense, self._price)
        return TrainedGate(self._options.gate, layers, thresholds, *found, self.key)

    def _list(self) -> list[Scorer]:
        return [scorer for scorer in self.scorers if isinstance(scorer, Scorer)]


def _schedule(number: int, steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * number / steps))
    return min(1.0, (number + 1) / WARM_UP) * (RATE_FLOOR + (1 - RATE_FLOOR) * cosine)


def _line(log: Sequence[Step], steps: int, price: float) -> str:
    """Return one line with means over the last steps. Single steps vary with their videos."""
    last = log[-10:]
    replay = sum(s.replay for s in last) / len(last)
    nll, dense = (float(np.mean([getattr(s, name) for s in last])) for name in ("nll", "nll_dense"))
    layers = " / ".join(f"{100 * share:.0f}" for share in np.mean([s.shares for s in last], 0))
    shares = f"replay {replay:.1%} ({layers})"
    return f"step {len(log)} of {steps}: {shares}, NLL {nll / dense:.3f} of {dense:.4g}, price {price:.2f}"
