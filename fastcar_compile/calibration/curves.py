"""Loss curves of single layers on the dense decoder, measured no further than a choice can use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fastcar_compile.calibration.allocate import Point, least_loss

HOPELESS = math.log(6.0)
"""A layer's curve is not measured beyond this loss (six times the NLL)."""


class LossCurves:
    """The points of every layer so far, in the order of their shares. Each begins with the closed layer.

    Args:
        measure: returns the point of a layer's share, a layer that may replay.
        able: for each layer, whether it may replay.

    Attributes:
        ended: layers whose curves ended before their last share.
    """

    def __init__(self, measure: Callable[[int, float], Point], able: Sequence[bool]) -> None:
        self._measure, self._able = measure, able
        self.points = [[Point(None, 0.0, 0.0)] for _ in able]
        self.ended = set[int]()

    def for_replay(self, shares: Sequence[float], target: float) -> list[list[Point]]:
        """Return the curves that `allocate` needs for a target.

        Layers are measured up to the first share above the target, where choices begin to reach it, then each as far as
        the best choice leaves open.
        """
        first = next((index for index, share in enumerate(shares) if share > target), len(shares)) + 1
        for part in (shares[:first], shares[first:]):
            self._extend(part, lambda: least_loss(self.points, target))
        return self.points

    def for_loss(self, shares: Sequence[float], most: float) -> list[list[Point]]:
        """Return the curves that `allocate_budget` needs for a limit on the loss; infinity: all points."""
        self._extend(shares, lambda: most)
        return self.points

    def _extend(self, shares: Sequence[float], most: Callable[[], float]) -> None:
        """Measure these shares of every layer.

        A curve ends at a loss that no choice of a total loss of `most` can have: its own, less what all other layers
        gain at best, is greater. So what is allocated stays the same, unless a curve falls again behind its end.
        """
        for layer, able in enumerate(self._able):
            for share in shares if able else ():
                # A layer gains where replay lowers the loss; a closed layer has 0, so a gain is never positive.
                gain = sum(min(p.loss for p in curve) for i, curve in enumerate(self.points) if i != layer)
                if self.points[layer][-1].loss > min(HOPELESS, most() - gain):
                    self.ended.add(layer)
                    break
                self.points[layer].append(self._measure(layer, share))
