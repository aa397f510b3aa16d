"""The device side of a backend: a function that opens an artifact, and the stepper that it returns."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import State
from fastcar_compile.errors import BackendError, InputError, InternalError
from fastcar_compile.ir.types import CONTEXT_ROLES, INACTIVE, PROMPT, REPLAY_ROLES, DecoderConfig
from fastcar_compile.runtime.guard import thread_count
from fastcar_compile.support.packages import Registry

Array = NDArray[Any]
Numbers = int | Array
"""One number for all rows of a decode step, or int64 [B] of decoders whose rows have their own (`compile(rows=…)`)."""


Parts = tuple[slice | int | Array, ...]
Index = int | Array | slice | Parts
"""A part of a state, as numpy takes it."""


@dataclass(frozen=True)
class StepResult:
    """One decode forward.

    Attributes:
        logits: float32 [B, 1, V], or hidden states [B, 1, H] of a headless decoder.
        decisions: bool [L, B], True where the row replayed.
        scores: float32 [L, B], the gate's score.
    """

    logits: Array
    decisions: Array
    scores: Array

    @classmethod
    def of(cls, found: Mapping[str, Array], layers: int) -> StepResult:
        """Return a result of a program's results by name; a dense decoder has neither decisions nor scores."""
        shape = (layers, len(found["logits"]))
        decisions, scores = found.get("decisions"), found.get("scores")
        return cls(
            found["logits"],
            np.zeros(shape, np.bool_) if decisions is None else decisions,
            np.zeros(shape, np.float32) if scores is None else scores,
        )


class Stepper(ABC):
    """Runs forwards and owns the state of one session. Two steppers share weights only.

    Attributes:
        prefill_chunk: tokens of one `prefill` call; 0: any number.
        single_tokens: up to this number, tokens are read faster by `prefill` calls of `together` tokens than by a chunk
            that is padded.
        video_chunk: tokens of one `prefill_video` call; 0: it cannot be called.
        row_thresholds: whether the rows of a decode step may have thresholds of their own.
        stages: whether `withdraw` can be called.
    """

    prefill_chunk: int = 0
    single_tokens: int = 0
    together: int = 1
    video_chunk: int = 0
    row_thresholds: bool = True
    stages: bool = False

    @cached_property
    def overwritten(self) -> Sequence[tuple[int | None, Sequence[State]]]:
        """States of which a token overwrites a row of a ring or a replay slot: sinks or None, and states of one kind.

        Raises:
            BackendError: the backend neither reads nor writes its states.
        """
        found = dict[object, list[State]]()
        for state in self.states():
            if state.sinks is not None or state.role in REPLAY_ROLES:
                found.setdefault(state.kind, []).append(state)
        return [(group[0].sinks, group) for group in found.values()]

    @abstractmethod
    def reset(self) -> None:
        """Set every state but the context's to zero."""

    def set_context(self, context: Array, mask: Array | None) -> None:
        """Compute the states that cross-attention reads. `reset` keeps them.

        Args:
            context: float32 [B, L, C]. mask: bool [B, L]; None: the decoder takes none.

        Raises:
            BackendError: the backend has no cross-attention.
        """
        raise BackendError(f"{type(self).__name__} has no cross-attention", hint="use the backend cpu or onnxruntime")

    @abstractmethod
    def prefill(self, inputs: Array, position: int) -> Array:
        """Write keys and values of tokens int64 [B, T] (or embeddings float32 [B, T, H]) from `position` on.

        Returns:
            logits float32 [B, T, V]. Replay state is not touched.
        """

    def prefill_video(self, inputs: Array, position: int, video: int) -> Array:
        """Read tokens of one video, as `prefill` does: int64 [1, T], T = `video_chunk`. The others stay as they are.

        Returns:
            logits float32 [1, T, V].
        """
        raise InternalError(f"{type(self).__name__} reads all videos together")

    @abstractmethod
    def decode(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> StepResult:
        """Run one decode forward of tokens int64 [B, 1] (or embeddings float32 [B, 1, H]).

        Args:
            position: sequence position of the token; -1: the row is not there. step: decode forward number t, or PROMPT
                or INACTIVE of `ir.types`.
            thresholds: float32 [L]; or [L, B] where rows have numbers of their own, alike without `row_thresholds`.
        """

    def draw(self, logits: Array, temperature: float, **numbers: int) -> Array | None:
        """Return what `Sampling` of a temperature and a top_k draws, or None: it has to be drawn elsewhere.

        Args:
            logits: float32 [B, N, V], of tokens that follow each other or of a part of them. temperature: from 1e-30 to
                1e30. numbers: position of the first, code, seed, and top_k or 0; see `ir.draws.DRAW_NUMBERS`.

        Returns:
            int64 [B, N]; -1 where a logit is NaN or infinite, or all are minus infinity.
        """
        return None

    def withdraw(self, rows: Array) -> None:
        """Let rows, bool [B], of the last decode step leave no trace in what MLPs replay."""
        raise InternalError(f"{type(self).__name__} stages nothing")

    def states(self) -> Sequence[State]:
        """Return what every state is.

        Raises:
            BackendError: the backend neither reads nor writes them.
        """
        raise self._sealed()

    def read(self, name: str, index: Index) -> Array:
        """Return a part of a state. It is valid until the next forward, and is only read."""
        raise self._sealed()

    def write(self, changes: Iterable[tuple[str, Index, Array]]) -> None:
        """Write parts of states, by name, one after the other; a value may be given as its bits."""
        raise self._sealed()

    def read_all(self, states: Sequence[State], index: Parts) -> Array:
        """Return a copy of the same part of states that are alike, one after the other."""
        return np.stack([self.read(state.name, index) for state in states])

    def write_all(self, states: Sequence[State], index: Parts, values: Array) -> None:
        """Write the same part of states that are alike."""
        self.write((state.name, index, value) for state, value in zip(states, values, strict=True))

    def again(self) -> Stepper:
        """Return a stepper of the same weights whose states are zero.

        Raises:
            BackendError: the device takes one session.
        """
        raise self._sealed()

    def fork(self, parts: Mapping[str, Index]) -> Stepper:
        """Return a stepper of the same weights whose states are equal to these.

        Args:
            parts: of every state; what stands elsewhere is zero.

        Raises:
            BackendError: the device takes one session.
        """
        other = self.again()
        other.write((name, index, self.read(name, index)) for name, index in parts.items())
        return other

    def _sealed(self) -> BackendError:
        what = f"the states of {type(self).__name__} cannot be copied nor set back"
        return BackendError(what, hint="use another backend: fastcar_compile's own read and write their states")


def in_rows(config: DecoderConfig, inputs: Array, position: Numbers, step: Numbers) -> dict[str, Any]:
    """Return what `decode` takes for n rows of each video, from one position on, or from one of its own.

    inputs: [B, n] or [B, n, H]; without rows of a video n is 1.
    """
    if config.rows is None:
        return {"inputs": inputs, "position": position, "step": step}
    n, tail = inputs.shape[1], inputs.shape[2:]

    def filled(values: Numbers, otherwise: int, dtype: Any = np.int64, tail: tuple[int, ...] = ()) -> Array:
        rows = np.empty((config.batch_size, config.rows or 1, *tail), dtype)
        rows[:, :n] = values
        if n < rows.shape[1]:
            rows[:, n:] = otherwise
        return rows.reshape(-1, *tail)

    places = filled(np.reshape(position, (-1, 1)) + np.arange(n, dtype=np.int64), -1)
    steps = filled(step if np.ndim(step) == 2 else np.reshape(step, (-1, 1)), INACTIVE)
    return {"inputs": filled(inputs, 0, inputs.dtype, tail)[:, None], "position": places, "step": steps}


def each_threshold(config: DecoderConfig, thresholds: Array) -> Array:
    """Return what a decode step takes of thresholds float32 [L] or [L, B]: with rows one for each, by layers."""
    if config.rows is None:
        return thresholds
    return thresholds.repeat(config.decode_rows) if thresholds.ndim == 1 else thresholds.reshape(-1)


class ValueStepper(Stepper):
    """A stepper whose states are values: every forward takes them by name, and returns new ones.

    Args:
        states: every state of the decoder.
    """

    _state: dict[str, Any]

    def __init__(self, config: DecoderConfig, states: Sequence[State]) -> None:
        self._config, self._states = config, states
        self._specs = [s for s in states if s.role not in CONTEXT_ROLES]
        self._context_state = self._zeros(s for s in states if s.role in CONTEXT_ROLES)
        self.reset()

    def _zeros(self, states: Iterable[State]) -> dict[str, Any]:
        return {s.name: self._value(np.zeros(s.shape, s.format.numpy)) for s in states}

    @abstractmethod
    def _array(self, value: Any) -> Array:
        """Return a state as an array."""

    @abstractmethod
    def _value(self, array: Array) -> Any:
        """Return an array of its own as a state."""

    @abstractmethod
    def _forward(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> dict[str, Array]:
        """Run one decode forward, keep the states that it returns, and return its other results by name."""

    @abstractmethod
    def _contexts(self, given: Mapping[str, Array]) -> Sequence[Any]:
        """Return the states of cross-attention, of `context` and, where the decoder takes one, of `context_mask`."""

    def reset(self) -> None:
        """Set every state but the context's to zero."""
        self._state = self._zeros(self._specs)

    def set_context(self, context: Array, mask: Array | None) -> None:
        """Compute the states that cross-attention reads; see Stepper.set_context."""
        made = self._contexts({"context": context} | ({} if mask is None else {"context_mask": mask}))
        self._context_state = dict(zip(self._context_state, made, strict=True))

    def prefill(self, inputs: Array, position: int) -> Array:
        """Run one token through decode forward number 0. The replay state that the forward returns is dropped."""
        # Every call returns new values, so references keep the replay state from before the call.
        kept = {s.name: self._state[s.name] for s in self._specs if s.role in REPLAY_ROLES}
        never = np.full(self._config.num_layers, np.inf, np.float32)
        step = 0 if self._config.rows is None else PROMPT
        logits = self._forward(**in_rows(self._config, inputs, position, step), thresholds=never)["logits"]
        self._state |= kept
        return logits[:: self._config.rows]

    def decode(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode."""
        return StepResult.of(self._forward(inputs, position, step, thresholds), len(thresholds))

    def states(self) -> Sequence[State]:
        """Return what every state is; see Stepper.states."""
        return self._states

    def read(self, name: str, index: Index) -> Array:
        """Return a part of a state; see Stepper.read."""
        return self._array((self._state | self._context_state)[name])[index]

    def write(self, changes: Iterable[tuple[str, Index, Array]]) -> None:
        """Write parts of states; see Stepper.write. Every changed state is a new value: others may have the old one."""
        made: dict[str, Array] = {}
        for name, index, value in changes:
            if name not in made:
                made[name] = self._array((self._state | self._context_state)[name]).copy()
            made[name][index] = value.view(made[name].dtype)
        for name, array in made.items():
            (self._state if name in self._state else self._context_state)[name] = self._value(array)

    def fork(self, parts: Mapping[str, Index]) -> Self:
        """Return a stepper that has the same values as states."""
        other = copy.copy(self)
        other._state, other._context_state = dict(self._state), dict(self._context_state)
        return other


@dataclass(frozen=True)
class BackendOptions:
    """The options of a caller. threads: CPU threads; None: every core that the process may use."""

    threads: int | None = None


class OpenStepper(Protocol):
    """Opens an artifact on one backend."""

    def __call__(self, artifact: StoredArtifact, options: BackendOptions) -> Stepper:
        """Return a stepper whose state is zero.

        Raises:
            BackendError: the artifact has nothing for this backend, or the backend cannot run here.
        """
        ...


BACKENDS = Registry(
    "backend",
    "fastcar_compile.backends",
    {
        "cpu": "fastcar_compile.runtime.backends.cpu:open_stepper",
        "onnxruntime": "fastcar_compile.runtime.backends.ort:open_stepper",
        "hls-csim": "fastcar_compile.runtime.backends.hls_csim:open_stepper",
        "eager": "fastcar_compile.runtime.backends.eager:open_stepper",
        "board": "fastcar_compile.runtime.backends.board:open_stepper",
        "webgpu": "fastcar_compile.runtime.backends.webgpu:open_stepper",
    },
    BackendError,
    {"onnxruntime": "onnxruntime", "webgpu": "gpu"},
)
"""Name of a backend -> its `OpenStepper`."""


def opened(artifact: StoredArtifact, backend: str | OpenStepper, threads: int | None) -> Stepper:
    """Return a stepper of an artifact whose state is zero.

    Args:
        backend: one of `BACKENDS`, or a function that opens a stepper. threads: CPU threads; None: all usable cores.

    Raises:
        BackendError: the backend is unknown, or cannot run here; or an earlier version made the artifact.
        InputError: `threads` is not a whole number, or is too large.
    """
    options = BackendOptions(None if threads is None else thread_count(threads))
    if any("spans" in variant.programs.decode.inputs for variant in artifact.manifest.host.variants):
        what = "an earlier version compiled this artifact, whose rows took ranges of positions"
        raise BackendError(what, where=str(artifact.path), hint="compile the model again")
    if isinstance(backend, str):
        return BACKENDS.load(backend)(artifact, options)
    if not callable(backend):
        hint = f"give one of {', '.join(BACKENDS.names())}"
        raise InputError(f"the backend is a {type(backend).__name__}", hint=hint)
    return backend(artifact, options)
