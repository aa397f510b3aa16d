"""The result of a calibration, as a file or inside an artifact."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError, model_serializer

from fastcar_compile.config import Threshold
from fastcar_compile.errors import ArtifactError, InputError, count_text, describe_validation, os_errors
from fastcar_compile.gates import gate_class
from fastcar_compile.support.values import checked, number, path_of, plain, read_json, sequence

_HINT = "give a file that `fastcar calibrate` wrote"


class ExpectedLayers(BaseModel):
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
        spared: share of all MLPs' weights that the replays did not read, net of the drafts'; None: there are no drafts.
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
    expected: ExpectedLayers | None = None
    spared: FiniteFloat | None = None

    @model_serializer(mode="wrap")
    def _without_nothing(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the fields without `expected` and `spared` of None: the one form of a manifest has no such field."""
        return {n: value for n, value in dump(self).items() if n not in ("expected", "spared") or value is not None}

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
            what = f"the thresholds are malformed: {describe_validation(error)}"
            raise ArtifactError(what, where=str(path), hint=_HINT) from error

    def check(self, gates: Sequence[str | None], where: str) -> None:
        """Raise ArtifactError unless the thresholds fit layers with these gates (None: a layer that never replays)."""
        compiled = sorted({g for g in gates if g is not None})
        if len(gates) != len(self.values) or compiled not in ([], [self.gate]):
            what = f"thresholds of gate {self.gate} for {count_text(len(self.values), 'layer')} do not fit "
            what += f"an artifact of {count_text(len(gates), 'layer')} with gate {', '.join(compiled) or 'none'}"
            raise ArtifactError(what, where=where, hint="calibrate this artifact")


class LayerThresholds:
    """What a caller may set as thresholds of an artifact's layers.

    Args:
        compiled: threshold of every layer; None: it never replays. gate: of the layers that may.

    Attributes:
        values: the compiled thresholds, float32 [L]; where the layer never replays, the value that no score passes.
        gates: gate of every layer; None: it never replays.
    """

    def __init__(self, compiled: Sequence[float | None], gate: str | None) -> None:
        self._never = np.inf if gate is None else gate_class(gate).comparison.never
        self._can_replay = [t is not None for t in compiled]
        self.gates = [gate if can else None for can in self._can_replay]
        self.values = self._filled(compiled)

    def of(self, threshold: float | Sequence[float | None] | Thresholds | None) -> NDArray[np.float32]:
        """Return the thresholds float32 [L] that one for all layers that may replay, or one for each, stands for.

        Raises:
            InputError: the length is wrong, a threshold is NaN, or a layer was compiled without replay.
            ArtifactError: the calibrated thresholds belong to another gate or number of layers.
        """
        if isinstance(threshold, Thresholds):
            threshold.check(self.gates, "set_threshold")
            threshold = threshold.values
        given = plain(threshold)
        if given is None or isinstance(given, int | float):
            value = None if given is None else number("the threshold", given)
            return self._filled([value if can else None for can in self._can_replay])
        values = sequence("the threshold", given)
        if len(values) != len(self._can_replay):
            what = f"{count_text(len(values), 'threshold')} for {count_text(len(self._can_replay), 'layer')}"
            raise InputError(what, hint="give one number, or one per layer")
        return self._filled([self._checked(layer, value) for layer, value in enumerate(values)])

    def given(self, values: NDArray[np.float32]) -> list[float | None]:
        """Return thresholds float32 [L] as a caller gives them; None: the layer does not replay."""
        return [None if value == self._never else value for value in values.tolist()]

    def _filled(self, thresholds: Sequence[float | None]) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # a threshold beyond float32 is infinite: every score passes, or none
            return np.array([self._never if t is None else t for t in thresholds], np.float32)

    def _checked(self, layer: int, value: Any) -> float | None:
        if value is None:
            return None
        found = number(f"the threshold of layer {layer}", value, "give a number, or None")
        if self._can_replay[layer]:
            return found
        hint = "recompile with a threshold for this layer, or give None"
        raise InputError(f"layer {layer} was compiled without replay", hint=hint)
