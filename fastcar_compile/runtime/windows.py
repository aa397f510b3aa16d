"""The window of Jacobi decoding: how many positions a decode step has, fixed or by what steps take and give."""

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.config.jacobi import Jacobi

_EXPLORE = 32
"""Every so many decode steps another width is tried: what steps take and give changes."""
_RATE = 0.1
"""Weight of a new sample: guesses of some ten decode steps count, about a frame."""


class WindowChoice:
    """Chooses the positions of each decode step. No choice changes a token.

    Args:
        most: the largest width: rows of a video, and tokens of a frame.
    """

    def __init__(self, jacobi: Jacobi, most: int) -> None:
        self._fixed = None if isinstance(jacobi.window, str) else min(jacobi.window, most)
        widths = {most, *(1 << n for n in range(most.bit_length()))}
        self._widths = sorted(width for width in widths if width <= most)
        # The widest step comes first: it tells of all rows how often they are right.
        self._untimed = self._widths[::-1]
        self._seconds: dict[int, float] = {}
        self._right: NDArray[np.float64] = np.ones(most)
        self._steps = 0

    def __call__(self) -> int:
        """Return the positions of the next decode step."""
        if self._fixed is not None:
            return self._fixed
        if self._untimed:
            return self._untimed[0]
        best = max(self._widths, key=lambda width: self._right[:width].sum() / self._seconds[width])
        if self._steps % _EXPLORE:
            return best
        turn = self._steps // _EXPLORE
        return self._widths[(self._widths.index(best) + (1 if turn % 2 else -1)) % len(self._widths)]

    def add(self, width: int, accepted: int, seconds: float) -> None:
        """Count a decode step; accepted: its first rows that were right, at least one."""
        self._steps += 1
        right = np.arange(width) < accepted
        rate = _RATE if self._seconds else 1.0
        self._right[:width] += rate * (right - self._right[:width])
        if accepted == width:  # of rows that were not there nothing is known; hope has them tried again
            self._right[width:] += rate / 4 * (1 - self._right[width:])
        if width in self._untimed:
            self._untimed.remove(width)
        before = self._seconds.get(width, seconds)
        # A step that was interrupted says little, so it counts as twice the time at most.
        self._seconds[width] = before + _RATE * (min(seconds, 2 * before) - before)
