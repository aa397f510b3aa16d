"""Cases to compare (gate, thresholds, attention), and the grid of cases from calibration videos."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError, UserError, names_text, os_errors
from fastcar_compile.gates import GateWeights
from fastcar_compile.support.values import read_json
from fastcar_compile.tune.rule import SinkWindow
from fastcar_compile.tune.search import Search

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

    def with_attention(self, attention: SinkWindow | None) -> Case:
        """Return the same case with other attention. Thresholds stay."""
        return replace(self, attention=attention)

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


def load_cases(
    path: str | Path, weights: GateWeights | None = None, gates: Collection[str] | None = None
) -> list[Case]:
    """Return the cases of a file written by `save_cases`. It names the weights of gate `learned` without holding them.

    Args:
        weights: these weights.
        gates: return cases of these gates only; default: all, with the dense decoder.

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
    return [_with_weights(case, weights, str(path)) for case in cases if gates is None or case.gate in gates]


def _with_weights(case: Case, weights: GateWeights | None, where: str) -> Case:
    wanted = None if case.replay is None else case.replay.gate_weights
    if case.replay is None or wanted is None:
        return case
    if weights != wanted:
        has = "no weights were given" if weights is None else f"those given are {weights.name}"
        what = f"case {case.name} has gate weights {wanted.name}, but {has}"
        raise UserError(what, where=where, hint="give the file that the cases were made with: --gate-weights FILE")
    return replace(case, replay=case.replay.model_copy(update={"gate_weights": weights}))


def random_case(target: float, layers: int) -> Case:
    """Return a case of gate `random`: every layer replays at the target ratio."""
    return Case("random", ReplayConfig(gate="random", threshold=[target] * layers), target)


def grid(
    searches: dict[ReplayConfig, Search],
    ratios: Sequence[float],
    calibrations: Sequence[str] = CALIBRATIONS,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Case]:
    """Return the dense case, then every gate at every ratio and calibration, then gate `random` once per ratio.

    Args:
        searches: for each gate with its options, a search on the calibration videos.

    Raises:
        InputError: a calibration is unknown, or a ratio is not in 0 to 1.
    """
    if unknown := [c for c in calibrations if c not in CALIBRATIONS]:
        hint = f"choose from {names_text(CALIBRATIONS, unknown[0])}"
        raise InputError(f"unknown calibration {unknown[0]!r}", hint=hint)
    if wrong := [r for r in ratios if not 0 <= r <= 1]:
        raise InputError(f"a replay ratio of {wrong[0]:g}", hint="give shares from 0 to 1")
    cases = [Case("dense")]
    layers = 0
    for config, search in searches.items():
        layers = len(search.closed)
        for ratio, calibration in product(ratios, (c for c in calibrations if c != "random")):
            say(f"{config.gate}, {calibration}, {ratio:g}")
            found = search.for_replay(ratio) if calibration == "calibrated" else search.uniform(ratio)
            cases.append(Case(calibration, config.model_copy(update={"threshold": found}), ratio))
    if "random" in calibrations:
        cases += [random_case(ratio, layers) for ratio in ratios]
    return cases
