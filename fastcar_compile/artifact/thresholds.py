"""The result of a calibration, as a file or inside an artifact."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError, model_serializer

from fastcar_compile.config import Threshold
from fastcar_compile.errors import ArtifactError, count_text, describe_validation, os_errors
from fastcar_compile.support.strict_json import read_json
from fastcar_compile.support.values import checked, path_of

_HINT = "give a file that `fastcar calibrate` wrote"


class Expected(BaseModel):
    """The share that other videos like the videos of a calibration will replay.

    Args:
        replay: mean over the videos; each video is judged by thresholds that met the target on the other videos.
        low, high: an interval around it that holds the share of many other videos with probability `confidence`.
        videos: number of videos of the calibration; a pair of guidance partners counts as one.
        videos_needed: number of videos that would give an interval of two points to either side.
        searched: number of videos on which the layers' shares of the replay were found; all videos met the target.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    replay: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    confidence: FiniteFloat
    videos: int
    videos_needed: int
    searched: int | None = None


@checked()
class Thresholds(BaseModel):
    """Calibrated thresholds of one decoder and gate.

    Args:
        gate: name of the gate that the thresholds belong to.
        values: one threshold per layer; None: this layer never replays.
        replay: share of the forwards t >= F that replayed on the calibration videos, over all layers.
        per_layer: the same per layer.
        nll, nll_dense: nats per token over all frames but the first, with and without replay.
        goal: the target of the calibration, in words.
        inputs: SHA-256 of weights, gate options and videos.
        expected: what other videos will replay; None: the calibration had one video, or the thresholds are from an
            artifact, which does not store it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gate: str
    values: tuple[Threshold | None, ...]
    replay: FiniteFloat
    per_layer: tuple[FiniteFloat, ...]
    nll: FiniteFloat
    nll_dense: FiniteFloat
    goal: str
    inputs: str
    expected: Expected | None = None

    @model_serializer(mode="wrap")
    def _without_nothing(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the fields without an `expected` of None: the one form of a manifest has no such field."""
        return {name: value for name, value in dump(self).items() if name != "expected" or value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dict; infinite thresholds are strings."""
        return self.model_dump(mode="json")

    def save(self, path: str | Path) -> None:
        """Write the file; the same thresholds give the same bytes."""
        file = path_of("the file", path)
        with os_errors("the thresholds cannot be written", file):
            file.write_text(json.dumps(self.to_json(), sort_keys=True, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`.

        Raises:
            ArtifactError: the file is missing or malformed.
        """
        data = read_json(path_of("the file", path), "thresholds", ArtifactError, hint=_HINT)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            text = "; ".join(describe_validation(error))
            raise ArtifactError(f"the thresholds are malformed: {text}", where=str(path), hint=_HINT) from error

    def check(self, gates: Sequence[str | None], where: str) -> None:
        """Raise ArtifactError unless the thresholds fit layers with these gates (None: a layer that never replays)."""
        compiled = sorted({g for g in gates if g is not None})
        if len(gates) != len(self.values) or compiled not in ([], [self.gate]):
            what = f"thresholds of gate {self.gate} for {count_text(len(self.values), 'layer')} do not fit "
            what += f"an artifact of {count_text(len(gates), 'layer')} with gate {', '.join(compiled) or 'none'}"
            raise ArtifactError(what, where=where, hint="calibrate this artifact")
