"""A session file, to a session whose decoder is a stand-in. The kernels of a real one write where the file says."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastcar_compile.artifact.sections import State
from fastcar_compile.errors import ArtifactError, InputError, UserError
from fastcar_compile.ir.types import ATTENTION_ROLES, INACTIVE, DecoderConfig, StateRole
from fastcar_compile.runtime.backends.base import Array, ValueStepper
from fastcar_compile.runtime.session import Session
from fastcar_compile.support.values import read_arrays
from fuzz.expect import Finding, accepted, as_file, folder, same

ROWS, LENGTH, FRAME, VOCABULARY = 2, 12, 3, 7
CONFIG = DecoderConfig(ROWS, LENGTH, FRAME, 1, 32, VOCABULARY, False, 1, rows=1)
STATES = [
    State(name="key", shape=(ROWS, 1, LENGTH, 33), dtype="int8", role=StateRole.KEY_CACHE, layer=0),
    State(name="value", shape=(ROWS, 1, LENGTH, 4), dtype="bfloat16", role=StateRole.VALUE_CACHE, layer=0),
    State(name="mlp", shape=(FRAME, ROWS, 4), dtype="float32", role=StateRole.MLP_CACHE, layer=0),
    State(name="chain", shape=(FRAME, ROWS), dtype="int32", role=StateRole.CHAIN_COUNT, layer=0),
]


class StandIn(ValueStepper):
    """Writes a row of the caches at each position, and a slot of replay in each decode step."""

    prefill_chunk = 1

    def _array(self, value: Any) -> Array:
        return value

    def _value(self, array: Array) -> Any:
        return array

    def _contexts(self, given: Mapping[str, Array]) -> Sequence[Any]:
        raise AssertionError("it has no context")

    def _forward(self, inputs: Array, position: Any, step: Any, thresholds: Array) -> dict[str, Array]:
        places, steps = np.broadcast_to(position, ROWS), np.broadcast_to(step, ROWS)
        if ((places < 0) & (steps != INACTIVE) | (places >= LENGTH)).any():
            raise Finding(f"rows at {places}, in caches of {LENGTH}")
        replays = np.zeros((1, ROWS), np.bool_)
        for row, (place, number) in enumerate(zip(places, steps, strict=True)):
            for state in STATES if place >= 0 else ():
                if state.role in ATTENTION_ROLES:
                    self._state[state.name][row, 0, place] = place
                elif number >= 0:
                    replays[0, row] = number >= FRAME
                    self._state[state.name][number % FRAME, row] = number // FRAME
        logits = np.zeros((ROWS, 1, VOCABULARY), np.float32)
        return {"logits": logits, "decisions": replays, "scores": np.zeros((1, ROWS), np.float32)}


def opened(record: bool = True) -> Session:
    return Session(StandIn(CONFIG, STATES), CONFIG, [0.5], gate="input_delta", record=record)


def saved(prompts: Sequence[int], steps: int, record: bool = True) -> bytes:
    """The file of a session with prompts of these lengths, after so many decode steps."""
    path = folder() / "made"
    with opened(record) as session:
        session.prefill([np.zeros(length, np.int64) for length in prompts])
        for _ in range(steps):
            session.step(np.zeros(ROWS, np.int64))
        session.save(path)
    return path.read_bytes()


_STOOD = saved((4, 2), 4)


def run(data: bytes) -> bool:
    """Load the file; decode on after it, or, where it is refused, from where the session stood."""
    path, again = as_file("session", data), folder() / "again"
    with opened() as session:
        session.load(as_file("stood", _STOOD))
        before = _facts(session)
        taken = accepted(UserError, lambda: _loaded(session, path))
        if not taken:
            same(_facts(session), before, "the session that refused a file")
        else:
            session.save(again)
            found, given = (read_arrays(file, "session", "") for file in (again, path))
            for name in set(found) - {"about", "behind"}:
                same(found[name].tobytes(), given[name].tobytes(), name)
        while session.position < LENGTH:
            session.step(np.zeros(ROWS, np.int64))
        session.stats.decisions.sum()
        return bool(taken)


def _loaded(session: Session, path: Any) -> bool:
    try:
        session.load(path)
    except UserError as error:
        if not isinstance(error, ArtifactError | InputError):
            raise Finding(f"{type(error).__name__} of a file") from error
        raise
    return True


def _facts(session: Session) -> list[Any]:
    stats = session.stats
    return [session.position, session.thresholds.tolist(), stats.forwards, stats.decisions.tolist(), stats.per_layer]
