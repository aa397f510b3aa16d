"""Training of gates, end to end through the decoder: the least NLL increase at a target replay ratio.

Every step decodes a few videos, teacher-forced. Decisions are hard forwards and soft backwards (straight-through, with
logistic noise that fades). The loss is the divergence of the replaying decoder from the dense one, relative to the
dense NLL, plus a price on every forward that computes. The price follows the shortfall from the target. The decoder is
frozen, or trained with its gates (`tune`); then the dense NLL is part of the loss.
"""

import copy
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import nn

from fastcar_compile.errors import InputError, names_text
from fastcar_compile.frontend.model_facts import ModelFacts
from fastcar_compile.support import values
from fastcar_compile.tune.calibrate import program_key
from fastcar_compile.tune.evaluator import check_tokens
from fastcar_compile.tune.rule import counts
from fastcar_compile.tune.search import Say
from fastcar_compile.tune.training.relaxed import RelaxedDecoder
from fastcar_compile.tune.training.steps import LARGEST_SEED, SCORERS, Options, TrainedGate, Training, TrainingState

UNITS = 16
"""Size of the hidden layer of a network that is trained."""
SLICE_TOKENS = 8192
"""Most tokens of the videos of a slice; a slice has one video at least."""


@dataclass(frozen=True)
class Setup:
    """The rest of the arguments of `train_gate`, by their names there."""

    tokens_per_frame: int | None = None
    prompt: int = 1
    start: TrainedGate | None = None
    checkpoint: str | Path | None = None
    progress: Say | None = None


def train_gate(
    model: nn.Module,
    videos: Any,
    *,
    gate: str = "learned",
    target_replay: float,
    units: int = UNITS,
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

    Deterministic for a seed, a PyTorch version and a number of threads. docs/reference/gates.md describes the method.

    Args:
        model: a decoder, as `compile` takes it, float32.
        videos: int64 [N, T], prompt included, not the videos that judge the result. No video is drawn again before all
            were drawn; `steps * batch` videos are best.
        gate: "learned" (a network on the MLP's input and its change), or "tas" (a weight per query head).
        target_replay: share of the forwards t >= F to replay, more than 0 and less than 1.
        units: size of the hidden layer of "learned".
        steps: steps of the optimiser. batch: videos per step, in equal slices of at most SLICE_TOKENS tokens.
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
    setup = Setup(tokens_per_frame, prompt, start, checkpoint, progress)
    return run(model, videos, options, setup).result()


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
    units: int = UNITS,
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


@torch.inference_mode(False)
@torch.enable_grad()
def run(model: nn.Module, videos: Any, options: Options, setup: Setup) -> Training:
    """Return a finished training. Arguments and errors are those of `train_gate`."""
    values.check_kind("model", model, nn.Module, "a decoder as `compile` takes it")
    values.check_kind("start", setup.start, (TrainedGate, type(None)), "a TrainedGate")
    say = values.reporter(setup.progress)
    options = dataclasses.replace(_checked(options), start=setup.start and setup.start.inputs)
    tokens = values.token_table("the videos", videos)
    prompt = values.whole("prompt", setup.prompt, 1)
    frame = frame_of(model, setup.tokens_per_frame)
    batch, length = min(options.batch, len(tokens)), tokens.shape[1]
    # The most videos of which a batch is made, of at most SLICE_TOKENS tokens together.
    rows = next(n for n in range(batch, 0, -1) if batch % n == 0 and (n * length <= SLICE_TOKENS or n == 1))
    decoder = RelaxedDecoder(model, rows, length - 1, frame, prompt)
    check_tokens(tokens, decoder.program.config, prompt, options.counted)
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
        raise InputError(what, hint=f"choose from {names_text(SCORERS, options.gate)}")
    if options.gate != "learned" and options.units != UNITS:
        raise InputError(f"units has no effect with gate={options.gate!r}", hint="leave units out")
    target = values.number("target_replay", options.target)
    if not 0 < target < 1:
        raise InputError(f"target_replay is {target:g}", hint="give a share between 0 and 1")
    softness = values.number("softness", options.softness)
    if not 0 < softness < math.inf:
        raise InputError(f"softness is {softness:g}", hint="give a number above 0")
    sizes = {name: values.whole(name, getattr(options, name), 1) for name in ("units", "steps", "batch")}
    seed, counted = values.whole("seed", options.seed, 0, LARGEST_SEED), values.token_range("counted", options.counted)
    return dataclasses.replace(options, target=target, softness=softness, seed=seed, counted=counted, **sizes)
