"""Where a session stands: which slots may be replayed, how much was, and what the last tokens overwrote."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.sections import State
from fastcar_compile.errors import InputError
from fastcar_compile.ir.types import ATTENTION_ROLES, REPLAY_ROLES, DecoderConfig
from fastcar_compile.runtime.backends.base import Array, Index, Parts, Stepper

NEVER = np.iinfo(np.int64).min
"""In `Slots.last`: no decode forward has written the slot."""


class Slots:
    """Which decode forward wrote each slot of the replay caches last.

    Forwards are numbered by their places: t = position - first. So a slot, t mod F, stays at one place of the frame,
    whatever was extended in between (docs/explanation/replay.md).

    Attributes:
        first: position of the first decode forward since the last reset, the length of the prompt; None: none has run.
        last: t of the forward that wrote each slot last, int64 [F]; NEVER: none.
    """

    def __init__(self, frame: int) -> None:
        self.first: int | None = None
        self.last: NDArray[np.int64] = np.full(frame, NEVER, np.int64)

    def step(self, position: int, ahead: int = 0) -> tuple[int, bool]:
        """Return the number of a decode forward for the graph, and whether its rows may replay.

        The forward is `ahead` behind the one at `position`, which comes next.

        A row may replay a slot that the forward t - F wrote. Otherwise the number is the slot's own: in frame 0 every
        row computes.
        """
        frame, t = len(self.last), self._number(position) + ahead
        slot = t % frame
        eligible = bool(self.last[slot] == t - frame)
        return t if eligible else slot, eligible

    def slot(self, position: int) -> int:
        """Return the slot of the decode forward at `position`."""
        return self._number(position) % len(self.last)

    def decoded(self, position: int) -> None:
        """Note the decode forward at `position`."""
        if self.first is None:
            self.first = position
        t = position - self.first
        self.last[t % len(self.last)] = t

    def _number(self, position: int) -> int:
        return 0 if self.first is None else position - self.first


_KEPT = 256
"""Forwards whose decisions are kept before they are added up: adding takes numpy longer than copying them."""


class Stats:
    """Replay statistics of the decode forwards since the last reset. Tokens that were not decoded are not counted.

    Attributes:
        forwards: number of decode forwards, one for each decoded token.
        steps: number of decode steps that ran: those of Jacobi decoding have several rows.
        eligible: number of those that might replay: the forward one frame earlier was a decode forward too.
        tokens_per_frame: F. Without `Session.extend`, a forward t is eligible when t >= F.
    """

    def __init__(self, layers: int, rows: int, tokens_per_frame: int, record: bool) -> None:
        self.forwards = self.eligible = self.steps = self._pending = 0
        self.tokens_per_frame = tokens_per_frame
        self._added = np.zeros((layers, rows), np.int64)
        self._latest = np.zeros((max(_KEPT, tokens_per_frame), layers, rows), np.bool_)
        self._trace: dict[int, np.ndarray] | None = {} if record else None

    def add(self, place: int, decisions: np.ndarray, eligible: Sequence[bool]) -> None:
        """Count forwards from a position on; decisions bool [L, B, n], n at most a frame."""
        count = len(eligible)
        if self._pending + count > len(self._latest):
            self._add_up()
        # The assignment copies: a backend's decisions are a view of memory that its next forward writes.
        self._latest[self._pending : self._pending + count] = decisions.transpose(2, 0, 1)
        self._pending += count
        self.forwards += count
        self.eligible += sum(eligible)
        if self._trace is not None:
            self._trace |= {place + k: decisions[:, :, k].copy() for k in range(count)}

    def saved(self) -> dict[str, np.ndarray]:
        """Return the counts, and what was recorded with its positions, as arrays by name."""
        trace = {} if self._trace is None else self._trace
        decided = np.array([*trace.values()], np.bool_).reshape(-1, *self._added.shape)
        return {"replays": self._counts, "decisions": decided, "places": np.array([*trace], np.int64)}

    def restore(self, forwards: int, eligible: int, arrays: Mapping[str, Array]) -> None:
        """Set new counts to what `saved` gave."""
        self.forwards, self.eligible, self._added = forwards, eligible, arrays["replays"]
        self.steps = forwards  # how the forwards were spread over steps is not saved
        if self._trace is not None:
            self._trace = dict(zip(arrays["places"].tolist(), arrays["decisions"], strict=True))

    def remove(self, place: int, decisions: np.ndarray, eligible: bool) -> None:
        """Count a forward no more."""
        self._add_up()
        self._added -= decisions
        self.forwards -= 1
        self.eligible -= eligible
        if self._trace is not None:
            self._trace.pop(place, None)

    def _add_up(self) -> None:
        self._added += self._latest[: self._pending].sum(0)
        self._pending = 0

    @property
    def _counts(self) -> np.ndarray:
        """Replays of each layer and row, int64 [L, B]."""
        return self._added + self._latest[: self._pending].sum(0)

    @property
    def tokens_per_step(self) -> float:
        """Decoded tokens of each decode step."""
        return self.forwards / self.steps if self.steps else 0.0

    @property
    def replay_ratio(self) -> float:
        """Share of (forward, layer, row) that replayed, all forwards counted, as in the paper."""
        total = self.forwards * self._added.size
        return float(self._counts.sum() / total) if total else 0.0

    @property
    def eligible_replay_ratio(self) -> float:
        """Share of (forward, layer, row) that replayed, counting only the eligible forwards."""
        total = self.eligible * self._added.size
        return float(self._counts.sum() / total) if total else 0.0

    @property
    def per_layer(self) -> list[float]:
        """Replay ratio of every layer, all forwards counted."""
        return (self._counts.sum(1) / max(1, self.forwards * self._added.shape[1])).tolist()

    @property
    def decisions(self) -> np.ndarray:
        """Replay decisions, bool [forwards, L, B].

        Raises:
            InputError: the session was not made with record=True.
        """
        if self._trace is None:
            raise InputError("decisions were not recorded", hint="open the session with record=True")
        return np.stack([*self._trace.values()]) if self._trace else np.zeros((0, *self._added.shape), bool)


@dataclass
class _Token:
    """What the token at one position overwrote.

    Attributes:
        states: name -> what was at an index of the state. forward: of a decode forward: slot, the values of
            `Slots.first` and `Slots.last` before it, its decisions bool [L, B], and whether it was eligible.
    """

    states: dict[str, tuple[Index, Array]] = field(default_factory=dict[str, tuple[Index, Array]])
    forward: tuple[int, int | None, int, Array, bool] | None = None


class Undo:
    """What the last tokens overwrote: rows of rings and slots of replay. Full caches lose nothing.

    Args:
        keep: tokens that can be taken back.

    Attributes:
        start: position of the first token that can be taken back.
    """

    def __init__(self, keep: int) -> None:
        self.keep, self.start = keep, 0
        self._tokens: dict[int, _Token] = {}

    def note(self, stepper: Stepper, place: int, slot: int | None = None) -> None:
        """Keep what the token at a position will overwrite; slot: of its replay state, of a decode forward."""
        # What a padded chunk overwrites behind its end is noted then, and is not what the real token finds.
        token = self._tokens.setdefault(place, _Token())
        for state in stepper.states():
            if state.name not in token.states and (index := _overwritten(state, place, slot)) is not None:
                token.states[state.name] = index, stepper.read(state.name, index).copy()

    def decoded(self, place: int, slots: Slots, decisions: Array, eligible: bool) -> None:
        """Keep what the decode forward at a position, which `slots` does not know yet, changes of the counts."""
        slot = slots.slot(place)
        self._tokens[place].forward = slot, slots.first, int(slots.last[slot]), decisions.copy(), eligible

    def moved(self, position: int) -> None:
        """Forget what is too old at a position."""
        start = max(self.start, position - self.keep)
        for place in range(self.start, start):
            self._tokens.pop(place, None)
        self.start = start

    def back(self, position: int, slots: Slots, stats: Stats) -> Iterator[tuple[str, Index, Array]]:
        """Yield what to write into the states so that `position` is the next one, and set slots and counts back."""
        for place in sorted((p for p in self._tokens if p >= position), reverse=True):
            token = self._tokens.pop(place)
            for name, (index, value) in token.states.items():
                yield name, index, value
            if token.forward is not None:
                slot, slots.first, slots.last[slot], decisions, eligible = token.forward
                stats.remove(place, decisions, eligible)


def _overwritten(state: State, place: int, slot: int | None) -> Index | None:
    """Return the part of a state that the token at a position overwrites; None: nothing that is still read."""
    if state.sinks is None:
        return slot if state.role in REPLAY_ROLES else None
    rows = state.shape[2]
    if place < rows:
        return None
    return slice(None), slice(None), state.sinks + (place - state.sinks) % (rows - state.sinks)


def rows_right(found: Array, read: Array) -> int:
    """Return how many rows of a decode step read right tokens: the first, and those behind whose tokens were found.

    Args:
        found: int64 [V, n], what follows each row. read: int64 [V, at least n], the tokens that the rows read.
    """
    # Lists of so few tokens are compared in less time than arrays.
    given = read[:, 1:].T.tolist()
    rights = takewhile(lambda pair: pair[0] == pair[1], zip(found[:, :-1].T.tolist(), given, strict=False))
    return 1 + sum(1 for _ in rights)


class Guessed:
    """What rows of a decode step that may turn out wrong overwrite: slots of replay, and rows of rings.

    A stepper that stages its replay states keeps them itself.

    Args:
        places: positions of the rows, int64 [n]. slots: of their replay states. videos: those whose rows they are.
    """

    def __init__(
        self, stepper: Stepper, config: DecoderConfig, places: Array, slots: Array, videos: slice = slice(None)
    ) -> None:
        self._kept: list[tuple[int, int, Array, Sequence[State], Array]] = []
        self._stepper, self._config, self._videos = stepper, config, videos
        for sinks, states in stepper.overwritten if len(places) and not stepper.stages else ():
            axis, first, at = 0, 0, slots
            if sinks is not None:
                rows = states[0].shape[2]
                first = min(max(rows - int(places[0]), 0), len(places))  # what these overwrite is empty
                axis, at = 2, sinks + (places[first:] - sinks) % (rows - sinks)
            if len(at):
                self._kept.append((axis, first, at, states, stepper.read_all(states, self._index(axis, at))))

    def _index(self, axis: int, at: Array) -> Parts:
        """Return the part of a state that has slots, or rows, at an axis; they follow each other, but for one turn."""
        first, last = int(at[0]), int(at[-1])
        rows = slice(first, last + 1) if last - first == len(at) - 1 else at  # numpy copies a slice in less time
        return (rows, self._videos) if axis == 0 else (self._videos, slice(None), rows)

    def accept(self, count: int) -> None:
        """Let the rows of each video from number `count` on leave no trace."""
        if self._stepper.stages:
            wrong = np.zeros((self._config.batch_size, self._config.rows or 1), bool)
            wrong[self._videos, count:] = True
            self._stepper.withdraw(wrong.reshape(-1))
            return
        for axis, first, at, states, values in self._kept:
            start = max(0, count - 1 - first)
            if start < len(at):
                part = (slice(None),) * (1 + axis) + (slice(start, None),)
                self._stepper.write_all(states, self._index(axis, at[start:]), values[part])


class Progress:
    """Where a session stands, beside its states.

    Args:
        record: keep every decision. keep: tokens that can be taken back.

    Attributes:
        position: of the next token; of the row whose prompt was longest, where prompts have different lengths.
        behind: int64 [B], how many positions each row is behind that.
    """

    def __init__(self, config: DecoderConfig, record: bool, keep: int) -> None:
        self.position, self.behind = 0, np.zeros(config.batch_size, np.int64)
        self.slots, self.journal = Slots(config.tokens_per_frame), Undo(keep)
        self.stats = Stats(config.num_layers, config.batch_size, config.tokens_per_frame, record)

    def note(self, stepper: Stepper, place: int) -> None:
        """Keep what the decode forward at a position, which comes next, will overwrite."""
        self.journal.note(stepper, place, self.slots.slot(place))

    def decided(self, place: int, decisions: Array, eligible: Sequence[bool]) -> None:
        """Count decode forwards from a position on; decisions bool [L, B, n]."""
        for k, each in enumerate(eligible):
            if self.journal.keep:
                self.journal.decoded(place + k, self.slots, decisions[:, :, k], each)
            self.slots.decoded(place + k)
        self.stats.add(place, decisions, eligible)

    def move(self, count: int) -> None:
        """Go on by some tokens."""
        self.position += count
        if self.journal.keep:
            self.journal.moved(self.position)

    def back(self, count: int) -> Iterator[tuple[str, Index, Array]]:
        """Go back by some tokens, and yield what to write into the states."""
        self.position -= count
        return self.journal.back(self.position, self.slots, self.stats)

    def filled(self, states: Iterable[State]) -> dict[str, Index]:
        """Return the part of every state, by name, that the tokens so far have written."""
        parts: dict[str, Index] = {}
        for state in states:
            parts[state.name] = slice(None)
            if state.role in ATTENTION_ROLES:
                parts[state.name] = slice(None), slice(None), slice(0, self.position)
            elif state.role in REPLAY_ROLES:
                parts[state.name] = np.flatnonzero(self.slots.last >= 0)
        return parts

    def saved(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return what `restore` takes, numbers and arrays."""
        numbers = {"position": self.position, "first": self.slots.first}
        numbers |= {"forwards": self.stats.forwards, "eligible": self.stats.eligible}
        return numbers, self.stats.saved() | {"last": self.slots.last, "behind": self.behind}

    def restore(
        self, position: int, first: int | None, forwards: int, eligible: int, arrays: Mapping[str, Array]
    ) -> None:
        """Stand where another session stood. Nothing before can be taken back."""
        self.position = self.journal.start = position
        self.behind, self.slots.first, self.slots.last = arrays["behind"], first, arrays["last"]
        self.stats.restore(forwards, eligible, arrays)
