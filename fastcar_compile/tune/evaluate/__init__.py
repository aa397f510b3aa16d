"""Quality measurements: gates, replay ratios, thresholds and sparse attention against the dense decoder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError, UserError, names_text, os_errors
from fastcar_compile.gates import GateWeights
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.support.packages import require
from fastcar_compile.support.values import read_json, reporter, token_range, token_table
from fastcar_compile.tune.calibrate import Setting, program_key, program_of, rules_of, search_of
from fastcar_compile.tune.evaluate.frames import Detokenize, Likeness, likeness, to_frames
from fastcar_compile.tune.evaluate.frames import entry_point as entry_point
from fastcar_compile.tune.evaluator import Evaluator, check_dense, of_prefill
from fastcar_compile.tune.journal import Journal
from fastcar_compile.tune.rule import Details
from fastcar_compile.tune.rule import SinkWindow as SinkWindow
from fastcar_compile.tune.search import Say

CALIBRATIONS = ("calibrated", "uniform", "random")


@dataclass(frozen=True)
class Case:
    """One row of a comparison.

    Attributes:
        calibration: "dense" (no replay), one of CALIBRATIONS, or the caller's own name.
        replay: the gate, its options and thresholds; None: dense.
        target: the target replay ratio of t >= F; None: no target.
        attention: None: attention to all earlier positions.
    """

    calibration: str
    replay: ReplayConfig | None = None
    target: float | None = None
    attention: SinkWindow | None = None

    @property
    def gate(self) -> str:
        """Name of the gate; "none" for the dense decoder."""
        return "none" if self.replay is None else self.replay.gate

    @property
    def name(self) -> str:
        """A short name that can be part of a file name."""
        parts = [self.calibration if self.replay is None else f"{self.gate}-{self.calibration}"]
        parts += [] if self.target is None else [f"{self.target:g}"]
        parts += [] if self.attention is None else [f"window{self.attention.window}-{self.attention.sinks}"]
        return "-".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return dataclasses.asdict(self) | {"replay": None if self.replay is None else self.replay.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """Return the case of `to_json`. Raise UserError, TypeError or KeyError on bad fields."""
        replay, attention = data["replay"], data["attention"]
        return cls(
            calibration=data["calibration"],
            replay=None if replay is None else ReplayConfig.from_json(replay),
            target=data["target"],
            attention=None if attention is None else SinkWindow(**attention),
        )


def save_cases(cases: Sequence[Case], path: str | Path) -> None:
    """Write cases with their thresholds. The same cases give the same bytes."""
    text = json.dumps([case.to_json() for case in cases], sort_keys=True, indent=1)
    with os_errors("the cases cannot be written", path):
        Path(path).write_text(text + "\n", "utf-8")


def load_cases(path: str | Path, weights: GateWeights | None = None) -> list[Case]:
    """Return the cases of a file written by `save_cases`. It names the weights of gate `learned` without holding them.

    Args:
        weights: these weights.

    Raises:
        UserError: the file is missing or malformed, or a case has other weights.
    """
    hint = "give a file written by --save-cases"
    try:
        data = read_json(Path(path), "cases", UserError, constants=True, hint=hint)
        if not isinstance(data, list):
            raise TypeError("the file holds no list of cases")
        cases = [Case.from_json(item) for item in data]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"the cases cannot be read: {error!r}", where=str(path), hint=hint) from error
    return [_with_weights(case, weights, str(path)) for case in cases]


def _with_weights(case: Case, weights: GateWeights | None, where: str) -> Case:
    wanted = None if case.replay is None else case.replay.gate_weights
    if case.replay is None or wanted is None:
        return case
    if weights != wanted:
        has = "no weights were given" if weights is None else f"those given are {weights.name}"
        what = f"case {case.name} has gate weights {wanted.name}, but {has}"
        raise UserError(what, where=where, hint="give the file that the cases were made with: --gate-weights FILE")
    return replace(case, replay=case.replay.model_copy(update={"gate_weights": weights}))


@dataclass(frozen=True)
class Result:
    """A measured case. Every token is predicted from the true past (teacher-forced).

    Attributes:
        row: JSON-safe values; docs/measurements/quality.md explains them.
        places: float64 [L, frames, F], share of the videos whose forward t = frame * F + place replayed.
        predicted: int64 [N, frames * F], the most likely symbols; where a token does not count, the true one.
    """

    row: dict[str, Any]
    places: np.ndarray
    predicted: np.ndarray


class Judge:
    """Measures cases on the videos of a study. The first frame never replays and counts nowhere.

    Raises:
        InputError: the videos do not fit the program, or a group does not fit the videos.
    """

    def __init__(self, study: Study) -> None:
        config = study.program.config
        self._study, self._frame, self._layers = study, config.tokens_per_frame, config.num_layers
        self._evaluator: tuple[Any, Evaluator] | None = None  # the last one: cases of one gate share their prompts
        self.dense = self._details(Case("dense"))
        self.frames = self.dense.losses.shape[1] // self._frame
        self._masks = {name: self._mask(name, frames) for name, frames in study.groups.items()}
        self._true = torch.from_numpy(study.videos)[:, study.setting.prompt :]
        self.truth = None if study.detokenize is None else self.pixels(self._whole(self._true).numpy())
        # The first frame never replays, so no figure counts it.
        self._everything = torch.ones_like(self.dense.counted)
        self._everything[:, : self._frame] = False
        check_dense(self._mean(self.dense.losses, self._everything))

    def measure(self, case: Case) -> Result:
        """Return the result of one case."""
        found = self.dense if case == Case("dense") else self._details(case)
        row: dict[str, Any] = {
            "decoder": self._study.decoder,
            "gate": case.gate,
            "calibration": case.calibration,
            "sparse_attention": "none" if case.attention is None else str(case.attention),
            "target_replay": case.target,
            "replay_ratio_all_forwards": float(found.replayed.double().mean()),
            "thresholds": None if case.replay is None else case.replay.to_json()["threshold"],
            "max_chain": None if case.replay is None else case.replay.max_chain,
            "refresh_every": None if case.replay is None else case.replay.refresh_every,
            "nll_by_frame": self._by_frame(found.losses),
            "token_agreement_by_frame": self._by_frame(self._agreement(found)),
            **self._figures(found, self._everything),
        }
        made = self._tokens(found)
        like = None if self.truth is None else likeness(self.pixels(made), self.truth)
        row |= {"psnr": None, "ssim": None, "psnr_by_frame": None}
        if like is not None:  # of the most likely symbols' frames against the true ones, from the second frame on
            every = slice(None)
            by_frame = [like.of((every, slice(i, i + 1))).psnr for i in range(1, self.frames)]
            row |= like.of((every, slice(1, None))).figures() | {"psnr_by_frame": [None, *by_frame]}
        if self._masks:
            row["groups"] = {name: self._group(found, like, name) for name in self._masks}
        return Result(plain(row), self._places(found), made)

    def pixels(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens int64 [N, frames * F] as float64 [N, frames, height, width, channels] from 0 to 1.

        Raises:
            InputError: there is no detokeniser, or it gave another shape or other values.
        """
        if self._study.detokenize is None:
            raise InputError("there is no detokeniser", hint="give one")
        return to_frames(self._study.detokenize, tokens, self.frames)

    def _details(self, case: Case) -> Details:
        # The dense decoder is a gate that never replays.
        replay = ReplayConfig(gate="never", threshold=None) if case.replay is None else case.replay
        # Thresholds are no part of the key: the evaluator shares prompts between thresholds of one gate.
        kept = (replay.model_copy(update={"threshold": self._closed(replay)}), case.attention)
        if self._evaluator is None or self._evaluator[0] != kept:
            study = self._study
            rules, setting = rules_of(kept[0], self._layers), study.setting
            found = Evaluator(study.program, study.videos, rules, setting.prompt, case.attention, setting.counted)
            self._evaluator = kept, found
        return self._evaluator[1].details(replay.thresholds(self._layers))

    def _closed(self, replay: ReplayConfig) -> tuple[float | None, ...] | None:
        """Return which layers are closed, where gate weights lack some of them, which an evaluator has to know."""
        weights = replay.gate_weights
        if weights is None or len(weights.layers) == self._layers:
            return None
        return tuple(None if value is None else 1.0 for value in replay.thresholds(self._layers))

    def _mask(self, name: str, frames: np.ndarray) -> Tensor:
        """Return which tokens of whole frames a group has, bool [N, n], without the first frame."""
        expected = (len(self._study.videos), self.frames)
        if frames.dtype != bool or frames.shape != expected:
            what = f"group {name!r} is {frames.dtype} {list(frames.shape)}, expected bool {list(expected)}"
            raise InputError(what, hint="say of each whole frame after the prompt whether it is in the group")
        if not frames[:, 1:].any():
            raise InputError(f"group {name!r} has no frame after the first one", hint="leave it out")
        mask = torch.zeros_like(self.dense.counted)
        self._whole(mask)[:] = torch.from_numpy(frames).repeat_interleave(self._frame, 1)
        mask[:, : self._frame] = False
        return mask

    def _group(self, found: Details, like: Likeness | None, name: str) -> dict[str, Any]:
        """Return the figures of a group's frames."""
        shown = self._study.groups[name].copy()
        shown[:, 0] = False
        pictures = {} if like is None else like.of(shown).figures()
        return {"frames": int(shown.sum())} | self._figures(found, self._masks[name]) | pictures

    def _figures(self, found: Details, mask: Tensor) -> dict[str, Any]:
        """Return the figures of the tokens of a mask, bool [N, n]."""
        replayed = found.replayed[:, mask[:, : found.replayed.shape[2]]].double()
        assert self._evaluator is not None
        return {
            "mlp_weights_spared": float(replayed.mean(1) @ torch.tensor(self._evaluator[1].spared).double())
            / self._layers,
            "replay_ratio": float(replayed.mean()),
            "replay_by_layer": replayed.mean(1).tolist(),
            "nll": self._mean(found.losses, mask),
            "nll_dense": self._mean(self.dense.losses, mask),
            "token_agreement": self._mean(self._agreement(found), mask),
        }

    def _agreement(self, found: Details) -> Tensor:
        return (found.predicted == self.dense.predicted).double()

    def _mean(self, values: Tensor, mask: Tensor) -> float:
        """Return the mean of values [N, n] at the tokens of a mask that count; infinity if it is not finite."""
        mean = float(values[mask & self.dense.counted].double().mean())
        return mean if math.isfinite(mean) else math.inf

    def _whole(self, values: Tensor) -> Tensor:
        return values[:, : self.frames * self._frame]

    def _by_frame(self, values: Tensor) -> list[float]:
        """Return the mean of values [N, n] for each whole frame, with the first."""
        counted = self.dense.counted.double()
        sums, numbers = (
            self._whole(part).reshape(len(part), self.frames, self._frame).sum((0, 2))
            for part in (torch.where(self.dense.counted, values.double(), 0.0), counted)
        )
        return (sums / numbers).tolist()

    def _tokens(self, found: Details) -> np.ndarray:
        """Return the most likely symbols of whole frames. Where a token does not count, it is the true one."""
        return self._whole(torch.where(found.counted, found.predicted, self._true)).numpy()

    def _places(self, found: Details) -> np.ndarray:
        """Return `Result.places`. The last forward of the last frame never runs, so its place is NaN."""
        shares = found.replayed.double().mean(1)
        padded = torch.nn.functional.pad(shares, (0, -shares.shape[1] % self._frame), value=math.nan)
        return padded.reshape(self._layers, -1, self._frame).numpy()


def plain(value: Any) -> Any:
    """Return JSON-safe values: an infinity becomes the text "inf"."""
    return json.loads(json.dumps(value), parse_constant=lambda name: str(float(name)))


class Study:
    """One decoder on one set of held-out videos.

    Args:
        source: an artifact, or a decoder as `compile` takes it, or a dense program of `program_of` with passes of the
            caller's own. Nothing is compiled, so any gate can be measured.
        videos: int64 [N, T], prompt included, not the videos that thresholds were chosen on.
        decoder: its name in the rows.
        tokens_per_frame, quant: for a decoder, as `calibrate` takes them.
        prompt: tokens before decoding starts.
        counted: ids of the tokens that count in means, as `calibrate` takes them.
        groups: name -> frames that are measured apart too, bool [N, frames], whole frames after the prompt.
        detokenize: gives the frames for PSNR, SSIM and pictures; None leaves these out.
        journal: a JSON file that keeps every row. An interrupted study continues from it.
        progress: called with one line per step. The logger `fastcar_compile` has it too, at INFO.

    Raises:
        InputError: the videos do not fit the decoder, or the detokeniser does not fit the videos.
    """

    def __init__(
        self,
        source: Artifact | nn.Module | DecoderProgram,
        videos: Any,
        *,
        decoder: str,
        tokens_per_frame: int | None = None,
        quant: str = "none",
        prompt: int = 1,
        counted: tuple[int, int] | None = None,
        groups: Mapping[str, Any] | None = None,
        detokenize: Detokenize | None = None,
        journal: str | Path | None = None,
        progress: Say | None = None,
    ) -> None:
        self.videos, self.decoder, self.detokenize = token_table("the videos", videos), decoder, detokenize
        self.setting, self._say = Setting(prompt, token_range("counted", counted)), reporter(progress)
        if detokenize is not None:
            require("evaluate", "skimage")
        self.groups = {name: np.asarray(frames, bool) for name, frames in (groups or {}).items()}
        if isinstance(source, DecoderProgram):
            self.program = source
        elif isinstance(source, Artifact):
            self.program = of_prefill(source.program)
        else:
            self.program = program_of(source, self.videos.shape, tokens_per_frame, quant)
        grouped = {name: frames.tolist() for name, frames in self.groups.items()}
        facts = {"decoder": decoder, **self.setting.facts(), **({"groups": grouped} if grouped else {})}
        key = program_key(self.program, facts, self.videos)
        self._journal = Journal(None if journal is None else Path(journal), key, "evaluation", "rows")

    @cached_property
    def judge(self) -> Judge:
        """The judge, made at the first measurement."""
        self._say("dense")
        return Judge(self)

    def plan(
        self,
        videos: Any,
        gates: Sequence[ReplayConfig],
        ratios: Sequence[float],
        calibrations: Sequence[str] = CALIBRATIONS,
        journals: str | Path | None = None,
    ) -> list[Case]:
        """Return the dense case, then every gate at every ratio and calibration, then gate `random` once per ratio.

        Args:
            videos: int64 [N, T], on which thresholds are chosen. journals: a folder for the measurements of every gate.

        Raises:
            InputError: a video is also held out, a calibration is unknown, or a ratio is not in 0 to 1.
        """
        tokens, cases = token_table("the calibration videos", videos), [Case("dense")]
        if {row.tobytes() for row in tokens} & {row.tobytes() for row in self.videos}:
            raise InputError("a calibration video is a held-out video too", hint="calibrate on other videos")
        if unknown := [c for c in calibrations if c not in CALIBRATIONS]:
            hint = f"choose from {names_text(CALIBRATIONS, unknown[0])}"
            raise InputError(f"unknown calibration {unknown[0]!r}", hint=hint)
        if wrong := [r for r in ratios if not 0 <= r <= 1]:
            raise InputError(f"a replay ratio of {wrong[0]:g}", hint="give shares from 0 to 1")
        for gate in dict.fromkeys(gates):
            book = None if journals is None else Path(journals) / f"{gate.gate}.json"
            search = search_of(self.program, gate, tokens, self.setting, book, self._say)[0]
            for ratio, calibration in product(ratios, (c for c in calibrations if c != "random")):
                self._say(f"{gate.gate}, {calibration}, {ratio:g}")
                found = search.for_replay(ratio) if calibration == "calibrated" else search.uniform(ratio)
                cases.append(Case(calibration, gate.model_copy(update={"threshold": found}), ratio))
        for ratio in ratios if "random" in calibrations else ():
            replay = ReplayConfig(gate="random", threshold=[ratio] * self.program.config.num_layers)
            cases.append(Case("random", replay, ratio))
        return cases

    def rows(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Return one JSON-safe row per case; infinities become the text "inf"."""
        rows = []
        for number, case in enumerate(cases, 1):
            name = json.dumps(case.to_json(), sort_keys=True)
            if self._journal.find(name) is None:
                self._say(f"{number} of {len(cases)}: {case.name}")
                self._journal.add(name, self.judge.measure(case).row)
            rows.append(self._journal.find(name))
        return rows
