"""When the next frame is due: at the world's speed or without that limit, and never more than the page draws."""

from collections import deque

from fastcar_play import limits

IN_FLIGHT = 3
"""Frames that were sent and are not drawn yet. More would only make the game answer later."""

AVERAGED = 24
"""Frames that the frames per second are measured over."""


class Pace:
    """The clock of one game. Times are seconds of any clock that only goes forwards.

    Attributes:
        running: the player wants to play. visible: somebody sees the page. sent: serial number of the last frame.
        limited: at most the world's frames per second.
    """

    def __init__(self, frames_per_second: float) -> None:
        self._period = 1 / frames_per_second
        self.running, self.visible, self.limited = False, True, True
        self.sent = self._drawn = 0
        self._due = 0.0
        self._times = deque[float](maxlen=AVERAGED + 1)

    @property
    def going(self) -> bool:
        """Frames are to be generated, if the page keeps up."""
        return self.running and self.visible

    def wait(self, now: float) -> float | None:
        """Return the seconds until the next frame is to be generated; None: not before the page says something."""
        if not self.going or self.sent - self._drawn >= IN_FLIGHT:
            return None
        return max(0.0, self._due - now)

    def drawn(self, serial: int) -> None:
        """Count what the page has drawn; numbers that were never sent count as the last one that was."""
        self._drawn = max(self._drawn, min(serial, self.sent))

    def begun(self, now: float) -> None:
        """Set the time of the frame after the one that is begun now. A late one is not made up for."""
        period = self._period if self.limited else 1 / limits.FRAMES_PER_SECOND
        self._due = max(self._due + period, now)

    def made(self, now: float) -> float | None:
        """Count a frame, and return frames per second lately; None after a pause."""
        self.sent += 1
        self._times.append(now)
        span = self._times[-1] - self._times[0]
        return (len(self._times) - 1) / span if span > 0 else None

    def paused(self) -> None:
        """Forget the speed: the time of a pause does not count."""
        self._times.clear()
