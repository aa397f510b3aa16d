"""What a session counts: replay decisions per forward, layer and row."""

from __future__ import annotations

import numpy as np

from fastcar_compile.errors import InputError

_KEPT = 256
"""Forwards whose decisions are kept before they are added up: adding takes numpy longer than copying them."""


class Stats:
    """Replay statistics of the decode forwards since the last reset. Prefill is not counted.

    Attributes:
        forwards: number of decode forwards.
        tokens_per_frame: F; a forward t may replay only when t >= F.
    """

    def __init__(self, layers: int, rows: int, tokens_per_frame: int, record: bool) -> None:
        self.forwards = 0
        self.tokens_per_frame = tokens_per_frame
        self._added = np.zeros((layers, rows), np.int64)
        self._latest = np.zeros((_KEPT, layers, rows), np.bool_)
        self._trace: list[np.ndarray] | None = [] if record else None

    def add(self, decisions: np.ndarray) -> None:
        """Count one forward; decisions bool [L, B]."""
        # The assignment copies: a backend's decisions are a view of memory that its next forward writes.
        self._latest[self.forwards % _KEPT] = decisions
        self.forwards += 1
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
        """The same, counting only the forwards that may replay (t >= F)."""
        total = max(0, self.forwards - self.tokens_per_frame) * self._added.size
        return float(self._counts.sum() / total) if total else 0.0

    @property
    def per_layer(self) -> list[float]:
        """Replay ratio of every layer, all forwards counted."""
        total = max(1, self.forwards * self._added.shape[1])
        return [float(n) / total for n in self._counts.sum(1)]

    @property
    def decisions(self) -> np.ndarray:
        """bool [forwards, L, B].

        Raises:
            InputError: the session was not made with record=True.
        """
        if self._trace is None:
            raise InputError("decisions were not recorded", hint="open the session with record=True")
        return np.stack(self._trace) if self._trace else np.zeros((0, *self._added.shape), bool)
