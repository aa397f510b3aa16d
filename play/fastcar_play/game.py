"""One visitor's game: dense, replay, or both side by side with the same draws and actions. No server, no clock."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError
from fastcar_compile.gates import gate_class
from fastcar_compile.gates.base import Comparison
from fastcar_compile.runtime.sampling import Sampling
from fastcar_play.pixels import Picture, Pixels
from fastcar_play.track import Opener, Step, Thresholds, Track
from fastcar_play.world import Action, Tokens, World

REHEARSED = 3
"""Frames that are generated before the server opens: the first has nothing to replay, two give scores."""


class Side(StrEnum):
    """One picture of the game."""

    DENSE = "dense"
    REPLAY = "replay"


class Mode(StrEnum):
    """What is generated."""

    DENSE = "dense"
    REPLAY = "replay"
    BOTH = "both"

    @property
    def sides(self) -> tuple[Side, ...]:
        """The pictures, from left to right."""
        return (Side.DENSE, Side.REPLAY) if self is Mode.BOTH else (Side(self.value),)


@dataclass(frozen=True)
class Beginning:
    """How a game begins. top_k: 0 draws among all codes."""

    start: int = 0
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0

    def sampling(self, codes: int) -> Sampling:
        """Return what draws the image tokens among so many codes: the same ones in a browser."""
        top_k = self.top_k if self.temperature and 0 < self.top_k < codes else None
        return Sampling(self.temperature, top_k, seed=self.seed, exact=True)


@dataclass(frozen=True)
class Replayable:
    """What an artifact can replay.

    Attributes:
        compiled: the thresholds that it comes with, one per layer; None: it has no replay.
        levels: levels[i] is the threshold for all layers that i % of the scores of the rehearsal pass; None: never.
    """

    compiled: tuple[float | None, ...] | None
    levels: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Stage:
    """What all visitors share.

    Args:
        name: of the artifact. gate: of its layers; None: there is no replay.
        spared: of each layer, the share of its MLP's weights that a replay does not read: all but its draft's.
    """

    name: str
    gate: str | None
    spared: tuple[float, ...]
    world: World
    pixels: Pixels
    opener: Opener
    replay: Replayable = field(default_factory=lambda: Replayable(None))

    @property
    def beginning(self) -> Beginning:
        """The beginning that the world asks for."""
        sampling = self.world.file.sampling
        return Beginning(temperature=sampling.temperature, top_k=sampling.top_k)


@dataclass(frozen=True)
class View:
    """One side of a moment. codes: of its tokens. step: None: a frame of the start, which was not generated."""

    side: Side
    picture: Picture
    codes: Tokens
    step: Step | None = None


@dataclass(frozen=True)
class Moment:
    """One frame of the game.

    Attributes:
        number: frames since the beginning; 0: the last frame of the start.
        pixel_seconds: what the pictures took.
    """

    number: int
    action: str
    views: tuple[View, ...]
    pixel_seconds: float = 0.0


def rehearsed(stage: Stage) -> Stage:
    """Return a stage whose replay is known. A few frames are generated, so what cannot work fails here.

    Raises:
        UserError: the decoder or the pictures do not work.
    """
    track = Track(stage.world, stage.opener)
    try:
        compiled = track.thresholds
        track.set_threshold(None)
        track.begin(stage.world.starts[0], stage.beginning.sampling(stage.world.file.image.count))
        steps = [track.frame(stage.world.file.action(()).token) for _ in range(REHEARSED)]
    finally:
        track.close()
    stage.pixels(steps[-1].codes)
    if stage.gate is None:
        return stage
    comparison = gate_class(stage.gate).comparison
    found = np.concatenate([step.scores.ravel() for step in steps[1:]])
    scores = found[np.isfinite(found)]
    levels = threshold_levels(scores, comparison) if scores.size else (None,)
    return replace(stage, replay=Replayable(tuple(None if t == comparison.never else t for t in compiled), levels))


def threshold_levels(scores: NDArray[np.float32], comparison: Comparison) -> tuple[float | None, ...]:
    """Return 101 thresholds: number i is passed by i % of the scores; number 0 by none."""
    shares = np.arange(1, 101) / 100
    at = 1 - shares if comparison is Comparison.AT_LEAST else shares
    method = "lower" if comparison is Comparison.AT_LEAST else "higher"
    return (None, *(float(value) for value in np.quantile(scores, at, method=method)))


class Game:
    """A game, in the thread that makes it.

    Attributes:
        mode: what is generated. threshold: of the replay side.
        beginning: how the game began. number: of the last frame.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        compiled = stage.replay.compiled
        self.mode = Mode.DENSE if compiled is None else Mode.REPLAY
        self.threshold: Thresholds = None if compiled is None else list(compiled)
        self.beginning, self.number = stage.beginning, 0
        self._tracks = self._opened()
        self.begin(self.beginning)

    def _opened(self) -> dict[Side, Track]:
        return {side: Track(self._stage.world, self._stage.opener) for side in self.mode.sides}

    def close(self) -> None:
        """Give back the sessions."""
        while self._tracks:
            self._tracks.popitem()[1].close()

    def begin(self, beginning: Beginning) -> None:
        """Start again.

        Raises:
            InputError: there is no such start, or the sampling is none.
        """
        world = self._stage.world
        if not 0 <= beginning.start < len(world.starts):
            what = f"there is no start {beginning.start}"
            raise InputError(what, hint=f"choose one of {len(world.starts)}, counted from 0")
        sampling = beginning.sampling(world.file.image.count)
        self.beginning, self.number = beginning, 0
        for track in self._tracks.values():
            track.begin(world.starts[beginning.start], sampling)
        self._apply_thresholds()

    def set_threshold(self, threshold: Thresholds) -> None:
        """Set the threshold of the replay side, from the next frame on.

        Raises:
            InputError: the artifact has no replay, or there are more or fewer thresholds than layers.
        """
        self._require_replay()
        self.threshold = threshold
        self._apply_thresholds()

    def _apply_thresholds(self) -> None:
        for side, track in self._tracks.items():
            track.set_threshold(self.threshold if side is Side.REPLAY else None)

    def _require_replay(self) -> None:
        if self._stage.replay.compiled is None:
            raise InputError("the artifact was compiled without replay", hint="compile it with a gate")

    def set_mode(self, mode: Mode) -> None:
        """Go on as dense, replay or both. A second side begins at the point where the first one is.

        Raises:
            InputError: the artifact has no replay.
        """
        if mode is not Mode.DENSE:
            self._require_replay()
        if mode is self.mode:
            return
        kept = self._tracks.pop(next((side for side in mode.sides if side in self._tracks), self.mode.sides[-1]))
        self.close()
        self.mode = mode
        self._tracks = {mode.sides[-1]: kept}
        if mode is Mode.BOTH:
            self._tracks = {Side.DENSE: kept.twin(self._stage.world), Side.REPLAY: kept}
        self._apply_thresholds()

    def first(self) -> Moment:
        """Return the frame that the game starts from, or is at."""
        views: list[View] = []
        offset, start = self._stage.world.file.image.offset, perf_counter()
        for side, track in self._tracks.items():
            codes = track.history[-1][1:] - offset
            views.append(View(side, self._stage.pixels(codes), codes))
        return Moment(self.number, "", tuple(views), perf_counter() - start)

    def advance(self, held: Collection[str]) -> Moment:
        """Generate the next frame, with these buttons held."""
        action: Action = self._stage.world.file.action(held)
        steps = {side: track.frame(action.token) for side, track in self._tracks.items()}
        start = perf_counter()
        views = tuple(View(side, self._stage.pixels(step.codes), step.codes, step) for side, step in steps.items())
        self.number += 1
        return Moment(self.number, action.name, views, perf_counter() - start)

    def settle(self) -> None:
        """Do what can be done before the next action is known."""
        for track in self._tracks.values():
            track.settle()
