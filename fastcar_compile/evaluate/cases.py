"""What is compared: gates, thresholds and attention, and how a grid of them is made from calibration videos."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fastcar_compile.calibrate.search import Search
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError, UserError
from fastcar_compile.evaluate.window import SinkWindow

CALIBRATIONS = ("calibrated", "uniform", "random")


@dataclass(frozen=True)
class Case:
    """One row of a comparison.

    Attributes:
        calibration: "dense" (no replay), one of CALIBRATIONS, or a name of the caller's.
        replay: the gate, its options and thresholds; None: dense.
        target: the replay ratio of t >= F that was asked for; None: none was.
        attention: None: to all earlier positions.
    """

    calibration: str
    replay: ReplayConfig | None = None
    target: float | None = None
    attention: SinkWindow | None = None

    @property
    def gate(self) -> str:
        """ "none" where nothing replays."""
        return "none" if self.replay is None else self.replay.gate

    @property
    def name(self) -> str:
        """Short, and good for a file name."""
        parts = [self.calibration if self.replay is None else f"{self.gate}-{self.calibration}"]
        parts += [] if self.target is None else [f"{self.target:g}"]
        parts += [] if self.attention is None else [f"window{self.attention.window}-{self.attention.sinks}"]
        return "-".join(parts)

    def with_attention(self, attention: SinkWindow | None) -> Case:
        """The same with other attention; thresholds stay."""
        return replace(self, attention=attention)

    def to_json(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "calibration": self.calibration,
            "target": self.target,
            "replay": None if self.replay is None else self.replay.to_json(),
            "attention": None if self.attention is None else dataclasses.asdict(self.attention),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """The inverse of `to_json`. Raises UserError, TypeError or KeyError on bad fields."""
        replay, attention = data["replay"], data["attention"]
        return cls(
            calibration=data["calibration"],
            replay=None if replay is None else ReplayConfig.from_json(replay),
            target=data["target"],
            attention=None if attention is None else SinkWindow(**attention),
        )


def save_cases(cases: Sequence[Case], path: str | Path) -> None:
    """Write cases with their thresholds; same cases, same bytes."""
    text = json.dumps([case.to_json() for case in cases], sort_keys=True, indent=1)
    Path(path).write_text(text + "\n", "utf-8")


def load_cases(path: str | Path) -> list[Case]:
    """Read a file written by `save_cases`.

    Raises:
        UserError: missing or malformed.
    """
    try:
        return [Case.from_json(item) for item in json.loads(Path(path).read_text("utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        mend = "give a file written by --save-cases"
        raise UserError(f"the cases cannot be read: {error!r}", where=str(path), mend=mend) from error


def random_case(target: float, layers: int) -> Case:
    """The study gate that knows nothing: every layer replays at the target ratio."""
    return Case("random", ReplayConfig(gate="random", threshold=[target] * layers), target)


def grid(
    searches: dict[ReplayConfig, Search],
    ratios: Sequence[float],
    calibrations: Sequence[str] = CALIBRATIONS,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Case]:
    """Dense, then every gate at every ratio and calibration; the random gate once per ratio.

    Args:
        searches: per gate, with its options, a search on the calibration videos.

    Raises:
        InputError: an unknown calibration, or a ratio outside of 0 to 1.
    """
    if unknown := [c for c in calibrations if c not in CALIBRATIONS]:
        raise InputError(f"unknown calibration {unknown[0]!r}", mend=f"choose from {', '.join(CALIBRATIONS)}")
    if wrong := [r for r in ratios if not 0 <= r <= 1]:
        raise InputError(f"a replay ratio of {wrong[0]:g}", mend="give shares from 0 to 1")
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
