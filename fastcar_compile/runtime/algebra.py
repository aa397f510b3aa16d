"""Sessions as values: which slots may be replayed after tokens that were given, not decoded."""

import numpy as np
from numpy.typing import NDArray

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
