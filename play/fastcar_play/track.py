"""One decoder on its way through a world: an action in, the image codes of the next frame out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import State
from fastcar_compile.runtime.backends.base import (
    Array,
    BackendOptions,
    Index,
    Numbers,
    OpenStepper,
    Stepper,
    StepResult,
    opened,
)
from fastcar_compile.runtime.sampling import Choose, Sampling, TokenChoice
from fastcar_compile.runtime.session import Session
from fastcar_play.world import Image, Tokens, World

Thresholds = list[float | None] | float | None
"""What `Session.set_threshold` takes: one per layer, one for all, or never."""


NO_TOKENS = np.zeros((1, 0), np.int64)
"""The prompt of a choice, in which no token is penalised."""


class OpenSession(Protocol):
    """Opens a session, such as `Artifact.session`."""

    def __call__(self, backend: OpenStepper, *, threads: int | None) -> Session:
        """Return a session over what `backend` opens."""
        ...


class Watch(Stepper):
    """A stepper that keeps decisions and scores of each position, which a session only counts.

    Attributes:
        found: decisions bool [L] and scores float32 [L] of the last forward at each position.
    """

    def __init__(self, inner: Stepper) -> None:
        self._inner, self.prefill_chunk = inner, inner.prefill_chunk
        self.found: dict[int, tuple[Array, Array]] = {}

    def reset(self) -> None:
        """Set every state to zero."""
        self._inner.reset()

    def prefill(self, inputs: Array, position: int) -> Array:
        """Read tokens; see Stepper.prefill."""
        return self._inner.prefill(inputs, position)

    def decode(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> StepResult:
        """Run one forward, and keep what it decided."""
        result = self._inner.decode(inputs, position, step, thresholds)
        decisions, scores = result.decisions.copy(), result.scores.copy()  # views of memory that is used again
        for row, place in enumerate(np.atleast_1d(position).tolist()):
            self.found[place] = decisions[:, row], scores[:, row]
        return result

    def draw(self, logits: Array, temperature: float, **numbers: int) -> Array | None:
        """Draw tokens; see Stepper.draw."""
        return self._inner.draw(logits, temperature, **numbers)

    def states(self) -> Sequence[State]:
        """Return what every state is."""
        return self._inner.states()

    def read(self, name: str, index: Index) -> Array:
        """Return a part of a state; see Stepper.read."""
        return self._inner.read(name, index)

    def write(self, changes: Iterable[tuple[str, Index, Array]]) -> None:
        """Write parts of states; see Stepper.write."""
        self._inner.write(changes)


class ImageTokens(Choose):
    """Chooses image tokens, and keeps the logits that the last choice of each position saw.

    Attributes:
        logits: float32 [V] by position. seconds: what choosing took.
    """

    def __init__(self, choose: TokenChoice, image: Image) -> None:
        self._choose, self._image = choose, image
        self.logits: dict[int, Array] = {}
        self.seconds = 0.0

    def __call__(self, logits: Array, position: int, part: int = 0) -> Tokens:
        """Return a token int64 [1]; see Choose."""
        return self._chosen(self._choose, logits[:, None], position)

    def several(self, logits: Array, position: int, read: Tokens | None, part: int = 0) -> Tokens:
        """Return tokens int64 [1, N]; see Choose."""
        choose = partial(self._choose.several, read=None if read is None else read - self._image.offset)
        return self._chosen(choose, logits, position)

    def _chosen(self, choose: Callable[..., Tokens], logits: Array, position: int) -> Tokens:
        """Return what a function chooses of logits [1, N, V]; of one position if it takes no more."""
        start, (offset, count) = perf_counter(), (self._image.offset, self._image.count)
        self.logits |= {position + k: row.copy() for k, row in enumerate(logits[0])}
        own = logits[..., offset : offset + count]
        tokens = choose(own[:, 0] if choose is self._choose else own, position) + offset
        self.seconds += perf_counter() - start
        return tokens


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
        self._sampling = Sampling()
        self._choose = self._sampling.start(NO_TOKENS)
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
        self._sampling, self._choose = sampling, sampling.start(NO_TOKENS).by(self._watch.draw)
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
        other._sampling, other._choose = self._sampling, self._sampling.start(NO_TOKENS).by(other._watch.draw)
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
        before, start = self._session.position, perf_counter()
        self.settle()
        begin, image = self._session.position, self._file.image
        choose = ImageTokens(self._choose, image)
        self._watch.found.clear()
        given = np.array([[action]], np.int64)
        codes = self._session.generate(given, image.tokens, choose, reset=False, decode=True)[0] - image.offset
        seconds = perf_counter() - start - choose.seconds
        self._pending = codes[-1:] + image.offset
        self._frames.append(np.concatenate([given[0], codes + image.offset]))
        decisions, scores = zip(*(self._watch.found[begin + i] for i in range(image.tokens)), strict=True)
        return Step(
            codes=codes,
            decisions=np.array(decisions, np.bool_),
            scores=np.array(scores, np.float32),
            logits=np.stack([choose.logits[begin + i] for i in range(image.tokens)]),
            seconds=seconds,
            sampling=choose.seconds,
            forwards=self._session.position - before,
            refilled=refilled,
        )
