"""The steps of a training, their state in a file, and the gate that they give. `train.py` says what is trained."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError, UserError
from fastcar_compile.gates.tensors import HINT, read_gate_file, write_gate_file
from fastcar_compile.gates.weights import GateWeights
from fastcar_compile.support import limits
from fastcar_compile.support.files import replace_file
from fastcar_compile.support.values import checked, parse_json, refuse_pipe
from fastcar_compile.tune.evaluator import check_dense
from fastcar_compile.tune.rule import counts
from fastcar_compile.tune.search import Say
from fastcar_compile.tune.training.relaxed import LearnedScorer, Relaxation, RelaxedDecoder, Sample, Scorer, TasScorer

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


LARGEST_SEED = (1 << 63) - 1
"""Bits that torch's generator takes."""


SAVE_EVERY = 10
"""Steps between two saved states of a training."""


@checked()
@pydantic_dataclass(frozen=True, eq=False, config=ConfigDict(arbitrary_types_allowed=True))
class TrainedGate:
    """Trained gates of all layers of one decoder. Calibrate their thresholds afterwards.

    Attributes:
        gate: "learned" or "tas".
        layers: the float32 tensors of each layer. "learned": w1 [units, 2 H], b1 [units], w2 [units], b2 [1]. "tas":
            heads [Hq].
        thresholds: those of the training, one per layer. Calibration finds better ones, and ones for other ratios.
        target: the share of the forwards t >= F that the gate was trained to replay.
        replay, nll, nll_dense: replayed share, and nats per token with and without replay, over the last steps.
        price: the last price of replay in relative NLL. A later training continues from it.
        inputs: SHA-256 of weights, options and videos.
    """

    gate: str
    layers: tuple[dict[str, Tensor], ...] = field(repr=False)
    thresholds: tuple[float, ...]
    target: float
    replay: float
    nll: float
    nll_dense: float
    price: float
    inputs: str

    def heads(self) -> list[dict[int, float]] | None:
        """Return the heads of "tas" as `ReplayConfig` takes them; None for another gate."""
        if self.gate != "tas":
            return None
        return [dict(enumerate(layer["heads"].tolist())) for layer in self.layers]

    def replay_config(self, **options: Any) -> ReplayConfig:
        """Return a config with this gate and its thresholds. `ReplayConfig` defines `options` (max_chain, …)."""
        trained: dict[str, Any] = {"threshold": self.thresholds}
        if self.gate == "tas":
            trained["heads"] = self.heads()
        else:
            trained["gate_weights"] = GateWeights.of(dict(enumerate(self.layers)))
        return ReplayConfig(gate=self.gate, **{**trained, **options})

    def facts(self) -> dict[str, Any]:
        """Return everything but the network's weights as JSON-safe values."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        named = {"gate": self.gate, "inputs": self.inputs, "heads": self.heads(), "thresholds": self.thresholds}
        return named | numbers

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with tensors `layer.{l}.{name}`. The same gate gives the same bytes."""
        tensors = {f"layer.{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.items()}
        facts = {name: repr(getattr(self, name)) for name in _NUMBERS}
        metadata = {"gate": self.gate, "inputs": self.inputs, **facts}
        metadata["thresholds"] = json.dumps(self.thresholds)
        write_gate_file(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the gate of a file written by `save`.

        Raises:
            UserError: the file is missing or malformed, or has another format or version.
        """
        metadata, tensors = read_gate_file(path)
        layers: dict[int, dict[str, Tensor]] = {}
        try:
            for name, tensor in tensors.items():
                _, index, part = name.split(".")
                layers.setdefault(int(index), {})[part] = tensor
            numbers = {name: float(metadata[name]) for name in _NUMBERS}
            thresholds = tuple(parse_json(metadata["thresholds"].encode(), constants=True))
            ordered = tuple(layers[i] for i in range(len(layers)))
            return cls(metadata["gate"], ordered, thresholds, inputs=metadata["inputs"], **numbers)
        except (ValueError, KeyError, TypeError, InputError) as error:
            text = error.what if isinstance(error, InputError) else repr(error)
            raise UserError(f"the gate is malformed: {text:.300}", where=str(path), hint=HINT) from error


_NUMBERS = ("target", "replay", "nll", "nll_dense", "price")


class TrainingState:
    """Weights, optimiser state and log of a training, in a file, so that an interrupted training continues.

    Args:
        path: the file; None keeps nothing. key: hash of everything that the training depends on. A file with another
            key is ignored.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key

    def load(self, scorers: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Restore weights and optimiser and return the saved log; None if there is no saved state.

        Raises:
            UserError: the file is no saved state.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            return self._restored(self._path, scorers, optimizer)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            text = str(error).partition("\n")[0][: limits.TEXT_ERROR]
            hint = "give the checkpoint of an interrupted training, or a new file"
            raise UserError(f"the checkpoint cannot be read: {text}", where=str(self._path), hint=hint) from error

    def _restored(self, path: Path, scorers: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        refuse_pipe(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != self._key:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        scorers.load_state_dict({n[2:]: t for n, t in tensors.items() if n.startswith("s/")})
        state: dict[int, dict[str, Tensor]] = {}
        for name in (n for n in tensors if n.startswith("o/")):
            _, index, part = name.split("/")
            state.setdefault(int(index), {})[part] = tensors[name]
        # Learning rates and groups come from the new optimiser; only the moments are restored.
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        log = parse_json(metadata["log"].encode(), constants=True)
        right = all(len(step) == 3 and all(value >= 0 for value in (*step[:2], *step[2])) for step in log["steps"])
        if not right or type(log["price"]) is not float:
            raise ValueError("its log is damaged")
        return log

    def save(self, scorers: nn.Module, optimizer: torch.optim.Optimizer, log: dict[str, Any]) -> None:
        """Save the state. The file is replaced as a whole."""
        if self._path is None:
            return
        tensors = {f"s/{name}": t.detach().clone().contiguous() for name, t in scorers.state_dict().items()}
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"o/{index}/{part}": t.clone() for part, t in values.items()}
        replace_file(self._path, save(tensors, {"key": self._key, "log": json.dumps(log)}))


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
class TrainingStep:
    """Measurements of one step: nats per token with and without replay, and the replayed share of each layer."""

    nll: float
    nll_dense: float
    shares: tuple[float, ...]

    @property
    def replay(self) -> float:
        """Mean of the layers' shares."""
        return sum(self.shares) / len(self.shares)

    @classmethod
    def mean(cls, steps: Sequence[Self]) -> Self:
        """Return the means of some steps."""
        nll, dense, shares = zip(*((s.nll, s.nll_dense, s.shares) for s in steps), strict=True)
        return cls(float(np.mean(nll)), float(np.mean(dense)), tuple(np.mean(shares, 0).tolist()))


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
        self.slices = max(1, min(options.batch, len(videos)) // decoder.rows)
        # The first slice sets the scale of the inputs, and so the first weights.
        samples = decoder.samples(self._batch(0)[:, :-1])
        self.scorers = nn.ModuleList(self._made(samples, random))
        self._price, rate = FIRST_PRICE, RATES[options.gate]
        if start is not None:
            self._go_on_from(start)
            rate /= 2
        self.weights = decoder.own_weights() if options.decoder_rate else {}
        weights = nn.ParameterList(self.weights.values())
        self._trained = nn.ModuleList([self.scorers, weights])
        parts = (*self._rates(rate), (weights, options.decoder_rate))
        self._groups = [{"params": list(part.parameters()), "peak": peak} for part, peak in parts if len(part)]
        self._optimizer = torch.optim.Adam(self._groups, betas=(0.9, 0.95))
        self.log: list[TrainingStep] = []

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
            self._price, self.log = before["price"], [TrainingStep(*entry) for entry in before["steps"]]
        count = self._options.steps
        for step_number in range(len(self.log), count):
            self.log.append(self._step(step_number))
            say(_line(self.log, count, self._price))
            if step_number % SAVE_EVERY == 0 or step_number + 1 == count:
                entries = [(s.nll, s.nll_dense, s.shares) for s in self.log]
                kept.save(self._trained, self._optimizer, {"price": self._price, "steps": entries})

    def _step(self, number: int) -> TrainingStep:
        options = self._options
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * _schedule(number, options.steps)
        self._optimizer.zero_grad()
        parts, short = list[TrainingStep](), list[float]()
        for index in range(self.slices):
            found, loss, missing = self._loss(self._batch(number, index), self._relaxation(number, index))
            loss.backward()
            parts.append(found)
            short.append(missing)
        for weight in self._trained.parameters():
            if weight.grad is not None:  # a weight that no slice uses has none
                weight.grad /= self.slices
        # The decoder's gradients are much larger in number, so each group has its own norm.
        for group in self._groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self._optimizer.step()
        # The price is the multiplier of the constraint. It never rewards less replay.
        self._price = max(0.0, self._price + PRICE_GAIN * float(np.mean(short)))
        return TrainingStep.mean(parts)

    def _relaxation(self, number: int, index: int) -> Relaxation:
        options = self._options
        progress = number / options.steps
        # The noise depends on step and slice alone, so a resumed training draws the same.
        seed = (options.seed * options.steps + number) * self.slices + index
        random = torch.Generator().manual_seed(seed % LARGEST_SEED)
        faded = max(0.0, 1 - progress / NOISE_ENDS)
        if options.start is None:
            return Relaxation(faded, random)
        softness = options.softness * SOFTNESS_FALLS**progress
        return Relaxation(FURTHER_NOISE * options.softness * faded, random, softness)

    def _loss(self, tokens: Tensor, relaxation: Relaxation) -> tuple[TrainingStep, Tensor, float]:
        """Return the measurements on videos [rows, T], the loss, and the shortfall of replay."""
        decoder = self._decoder
        first = decoder.prompt - 1 + decoder.frame
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        chosen = counts(targets, self._options.counted)
        later = chosen[:, first:]
        logits, shares = decoder.replayed(inputs, self._list(), relaxation)
        played = torch.log_softmax(logits[:, first:][later], -1)
        # The dense decoder is the teacher. It has a gradient only where its own weights are trained.
        every = torch.log_softmax(decoder.dense(inputs), -1)
        dense = every[:, first:][later].detach()
        wanted = targets[:, first:][later][:, None]
        nll, nll_dense = (float(-p.detach().gather(-1, wanted).mean()) for p in (played, dense))
        loss = (dense.exp() * (dense - played)).sum(-1).mean()
        if self.weights:
            decoded = chosen[:, decoder.prompt - 1 :]
            own = targets[:, decoder.prompt - 1 :][decoded][:, None]
            loss = loss - every[:, decoder.prompt - 1 :][decoded].gather(-1, own).mean()
        short = self._options.target - shares.mean()
        # The mean over all steps keeps one unusual batch from changing the price of replay.
        scale = check_dense(float(np.mean([*(step.nll_dense for step in self.log), nll_dense])))
        price = max(0.0, self._price + SHORTFALL_GAIN * float(short.detach()))
        found = TrainingStep(nll, nll_dense, tuple(shares.detach().tolist()))
        return found, loss / scale + price * short, float(short.detach())

    def _batch(self, number: int, index: int = 0) -> Tensor:
        """Return the videos of a step's slice. Every pass over the videos has its own order."""
        count, rows = len(self._videos), self._decoder.rows
        per_pass = count // (rows * self.slices)
        random = torch.Generator().manual_seed(self._options.seed + number // per_pass)
        # The order depends on the pass alone. Videos that fill no batch wait for another pass.
        order = torch.randperm(count, generator=random)
        start = (number % per_pass * self.slices + index) * rows
        return self._videos[order[start : start + rows]]

    def result(self) -> TrainedGate:
        """Return the trained gate, with figures over the last steps."""
        last = self.log[-max(1, round(TAIL * len(self.log))) :]
        replay, found = float(np.mean([step.replay for step in last])), TrainingStep.mean(last)
        layers, thresholds = zip(*((s.weights(), s.threshold()) for s in self._list()), strict=True)
        figures = (self._options.target, replay, found.nll, found.nll_dense, self._price)
        return TrainedGate(self._options.gate, layers, thresholds, *figures, self.key)

    def _list(self) -> list[Scorer]:
        return [scorer for scorer in self.scorers if isinstance(scorer, Scorer)]


def _schedule(number: int, steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * number / steps))
    return min(1.0, (number + 1) / WARM_UP) * (RATE_FLOOR + (1 - RATE_FLOOR) * cosine)


def _line(log: Sequence[TrainingStep], steps: int, price: float) -> str:
    """Return one line with means over the last steps. Single steps vary with their videos."""
    last = TrainingStep.mean(log[-10:])
    layers = " / ".join(f"{100 * share:.0f}" for share in last.shares)
    nll = f"NLL {last.nll / last.nll_dense:.3f} of {last.nll_dense:.4g}"
    return f"step {len(log)} of {steps}: replay {last.replay:.1%} ({layers}), {nll}, price {price:.2f}"
