"""Where a session stands: which slots may be replayed, and how much was."""

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError

_NEVER = np.iinfo(np.int64).min


class Slots:
    """Which decode forward wrote each slot of the replay caches last.

    Forwards are numbered by their places: t = position - first. So a slot, t mod F, stays at one place of the frame,
    whatever was extended in between (docs/explanation/replay.md).

    Attributes:
        first: position of the first decode forward since the last reset, the length of the prompt; None: none has run.
        last: t of the forward that wrote each slot last, int64 [F]; negative: none.
    """

    def __init__(self, frame: int) -> None:
        self.first: int | None = None
        self.last: NDArray[np.int64] = np.full(frame, _NEVER, np.int64)

    def step(self, position: int) -> tuple[int, bool]:
        """Return the number of the decode forward at `position` for the graph, and whether its rows may replay.

        A row may replay a slot that the forward t - F wrote. Otherwise the number is the slot's own: in frame 0 every
        row computes.
        """
        frame, t = len(self.last), 0 if self.first is None else position - self.first
        slot = t % frame
        eligible = bool(self.last[slot] == t - frame)
        return t if eligible else slot, eligible

    def decoded(self, position: int) -> None:
        """Note the decode forward at `position`."""
        if self.first is None:
            self.first = position
        t = position - self.first
        self.last[t % len(self.last)] = t


_KEPT = 256
"""Forwards whose decisions are kept before they are added up: adding takes numpy longer than copying them."""


class Stats:
    """Replay statistics of the decode forwards since the last reset. Tokens that were not decoded are not counted.

    Attributes:
        forwards: number of decode forwards.
        eligible: number of those that might replay: the forward one frame earlier was a decode forward too.
        tokens_per_frame: F. Without `Session.extend`, a forward t is eligible when t >= F.
    """

    def __init__(self, layers: int, rows: int, tokens_per_frame: int, record: bool) -> None:
        self.forwards = self.eligible = 0
        self.tokens_per_frame = tokens_per_frame
        self._added = np.zeros((layers, rows), np.int64)
        self._latest = np.zeros((_KEPT, layers, rows), np.bool_)
        self._trace: list[np.ndarray] | None = [] if record else None

    def add(self, decisions: np.ndarray, eligible: bool) -> None:
        """Count one forward; decisions bool [L, B]."""
        # The assignment copies: a backend's decisions are a view of memory that its next forward writes.
        self._latest[self.forwards % _KEPT] = decisions
        self.forwards += 1
        self.eligible += eligible
        if self._trace is not None:
            self._trace.append(decisions.copy())
        if self.forwards % _KEPT == 0:
            self._added += self._latest.sum(0)

    @property
    def _counts(self) -> np.ndarray:
        """Replays of each layer and row, int64 [L, B]."""
        return self._added + self._latest[: self.forwards % _KEPT].sum(0)

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
        return np.stack(self._trace) if self._trace else np.zeros((0, *self._added.shape), bool)
