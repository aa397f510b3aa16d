"""One decoder on its way through a world: an action in, the image codes of the next frame out."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.runtime.backends.base import (
    Array,
    BackendOptions,
    Numbers,
    OpenStepper,
    Stepper,
    StepResult,
    opened,
)
from fastcar_compile.runtime.sampling import Sampling, TokenChoice
from fastcar_compile.runtime.session import Session
from fastcar_play.world import Tokens, World

Thresholds = list[float | None] | float | None
"""What `Session.set_threshold` takes: one per layer, one for all, or never."""


class OpenSession(Protocol):
    """Opens a session, such as `Artifact.session`."""

    def __call__(self, backend: OpenStepper, *, threads: int | None) -> Session:
        """Return a session over what `backend` opens."""
        ...


class Watch(Stepper):
    """A stepper that keeps the decisions and scores of the last forward, which a session only counts.

    Attributes:
        decisions: bool [L, B]. scores: float32 [L, B].
    """

    def __init__(self, inner: Stepper) -> None:
        self._inner, self.prefill_chunk = inner, inner.prefill_chunk
        self.decisions: Array = np.zeros((1, 1), np.bool_)
        self.scores: Array = np.zeros((1, 1), np.float32)

    def reset(self) -> None:
        """Set every state to zero."""
        self._inner.reset()

    def prefill(self, inputs: Array, position: int) -> Array:
        """Read tokens; see Stepper.prefill."""
        return self._inner.prefill(inputs, position)

    def decode(
        self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array, spans: Array | None = None
    ) -> StepResult:
        """Run one forward, and keep what it decided."""
        result = self._inner.decode(inputs, position, step, thresholds, spans)
        self.decisions, self.scores = (
            result.decisions.copy(),
            result.scores.copy(),
        )  # views of memory that is used again
        return result


@dataclass(frozen=True)
class Opener:
    """Opens watched sessions of one artifact. session: for example `Artifact.session`. backend: as it takes one."""

    session: OpenSession
    backend: str | OpenStepper = "cpu"
    threads: int | None = None

    def __call__(self) -> tuple[Session, Watch]:
        """Return a session and what watches it."""
        watches: list[Watch] = []

        def watched(artifact: StoredArtifact, options: BackendOptions) -> Watch:
            watches.append(Watch(opened(artifact, self.backend, options.threads)))
            return watches[0]

        return self.session(watched, threads=self.threads), watches[0]


@dataclass(frozen=True)
class Step:
    """One generated frame.

    Attributes:
        codes: image codes, int64 [tokens].
        decisions: True where a layer replayed in the forward that chose a token, bool [tokens, L].
        scores: of the gate in the same forwards, float32 [tokens, L]. logits: of these forwards, float32 [tokens, V].
        seconds: of the forwards. sampling: of the draws. forwards: how many.
        refilled: the session was full, and reads the last frames again.
    """

    codes: Tokens
    decisions: NDArray[np.bool_]
    scores: NDArray[np.float32]
    logits: NDArray[np.float32]
    seconds: float
    sampling: float
    forwards: int
    refilled: bool


class Track:
    """One decoder session in a world. It belongs to the thread that makes it.

    A frame is the action token and the image tokens. The last image token of a frame is fed by `settle`, or before the
    next action.
    """

    def __init__(self, world: World, opener: Opener) -> None:
        self._file, self._opener = world.file, opener
        self._session, self._watch = opener()
        self._frames = deque[Tokens](maxlen=self._kept(self._session.config.max_seq_len))
        self._choose: TokenChoice = Sampling().start(np.zeros((1, 0), np.int64))
        self._pending: Tokens | None = None

    def _kept(self, positions: int) -> int:
        """Return the frames that a full session is filled with: half of what it holds at most."""
        return max(1, min(self._file.context_frames, positions // self._file.tokens_per_frame // 2))

    @property
    def history(self) -> tuple[Tokens, ...]:
        """The last frames, token ids with the action in front."""
        return tuple(self._frames)

    def close(self) -> None:
        """Give back the session."""
        self._session.close()

    def begin(self, start: Tokens, sampling: Sampling) -> None:
        """Start from frames int64 [frames, tokens per frame], with the draws of the sampling's seed."""
        self._choose = sampling.start(np.zeros((1, 0), np.int64))
        self._frames.clear()
        self._frames.extend(start)
        self._fill()

    def _fill(self) -> None:
        self._session.reset()
        self._session.prefill(np.concatenate(self._frames)[None])
        self._pending = None

    def twin(self, world: World) -> Track:
        """Return another decoder at the same point with the same draws to come; this one reads its frames again.

        So the two have equal caches, and neither has outputs to replay.
        """
        other = Track(world, self._opener)
        other._choose = copy.deepcopy(self._choose)
        other._frames.extend(self._frames)
        other._fill()
        self._fill()
        return other

    @property
    def thresholds(self) -> list[float]:
        """What decides about replay now, one per layer."""
        return [float(value) for value in self._session.thresholds]

    def set_threshold(self, threshold: Thresholds) -> None:
        """Set what decides about replay; see Session.set_threshold."""
        self._session.set_threshold(threshold)

    def settle(self) -> None:
        """Feed the last token of the frame, so that the next action does not wait for it."""
        if self._pending is not None:
            self._session.step(self._pending)
            self._pending = None

    def frame(self, action: int) -> Step:
        """Generate the frame of an action token."""
        needed = self._file.tokens_per_frame + (self._pending is not None)
        refilled = self._session.position + needed > self._session.config.max_seq_len
        if refilled:
            self._fill()
        before, start, drawing = self._session.position, perf_counter(), 0.0
        self.settle()
        image, decisions, scores, seen = self._file.image, list[Array](), list[Array](), list[Array]()
        tokens, token = [action], np.array([action], np.int64)
        for _ in range(image.tokens):
            logits = self._session.step(token)
            decisions.append(self._watch.decisions[:, 0])
            scores.append(self._watch.scores[:, 0])
            seen.append(logits[0])
            drawn = perf_counter()
            own = logits[:, image.offset : image.offset + image.count]
            token = self._choose(own, self._session.position - 1) + image.offset
            drawing += perf_counter() - drawn
            tokens.append(int(token[0]))
        self._pending = token
        seconds = perf_counter() - start - drawing
        frame = np.array(tokens, np.int64)
        self._frames.append(frame)
        return Step(
            codes=frame[1:] - image.offset,
            decisions=np.array(decisions, np.bool_),
            scores=np.array(scores, np.float32),
            logits=np.array(seen, np.float32),
            seconds=seconds,
            sampling=drawing,
            forwards=self._session.position - before,
            refilled=refilled,
        )
