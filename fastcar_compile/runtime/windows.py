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
        # The widest step comes first: it tells of all rows how often they are right. The first time warms up.
        self._untimed = [width for width in self._widths[::-1] for _ in range(2)]
        self._seconds: dict[int, float] = {}
        self._right: NDArray[np.float64] = np.ones(most)
        self._steps = 0

    def __call__(self, room: int) -> int:
        """Return the positions of the next decode step, at most `room`."""
        if self._fixed is not None:
            return min(self._fixed, room)
        fit = [width for width in self._widths if width <= room]
        if untimed := [width for width in self._untimed if width <= room]:
            return untimed[0]
        best = max(range(len(fit)), key=lambda i: self._right[: fit[i]].sum() / self._seconds[fit[i]])
        if self._steps % _EXPLORE:
            return fit[best]
        return fit[(best + (1 if self._steps // _EXPLORE % 2 else -1)) % len(fit)]

    def add(self, width: int, accepted: int, seconds: float) -> None:
        """Count a decode step; accepted: its first rows that were right, at least one."""
        if self._fixed is not None:
            return
        self._steps += 1
        right = np.arange(width) < accepted
        rate = _RATE if self._seconds else 1.0
        self._right[:width] += rate * (right - self._right[:width])
        if accepted == width:  # of rows that were not there nothing is known; hope has them tried again
            self._right[width:] += rate / 4 * (1 - self._right[width:])
        if width in self._untimed:
            self._untimed.remove(width)
        before = self._seconds.get(width, seconds)
        # What interrupts a step makes it longer, nothing makes it shorter: a shorter time counts at once.
        self._seconds[width] = min(seconds, before + _RATE * (min(seconds, 2 * before) - before))
