"""Loss curves of single layers on the dense decoder, measured no further than a choice can use them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastcar_compile.errors import InputError

UNITS = 1000
"""Steps of a ratio from 0 to 1. Ratios are rounded down, so that a target met in units is met in fact."""


@dataclass(frozen=True)
class Point:
    """One threshold of one layer: the share of its forwards that replay, and the increase of the log NLL."""

    threshold: float | None
    ratio: float
    loss: float


def frontier(curves: Sequence[Sequence[Point]]) -> dict[int, tuple[float, tuple[int, ...]]]:
    """Return the least total loss for every reachable sum of ratios, and the points that give it.

    Args:
        curves: the points of each layer.

    Returns:
        Sum of the layers' ratios in units -> (loss, index of each layer's point).
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for curve in curves:
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for units, (loss, chosen) in best.items():
            for index, point in enumerate(curve):
                # The ratio is rounded down, so a sum that reaches the target in units reaches it in fact.
                key = units + int(point.ratio * UNITS)
                candidate = (loss + point.loss, (*chosen, index))
                # Equal losses are decided by the indices, so the result does not depend on the order of the dictionary.
                if key not in grown or candidate < grown[key]:
                    grown[key] = candidate
        best = grown
    return best


def least_loss(curves: Sequence[Sequence[Point]], target_replay: float) -> float:
    """Return the total loss of what `allocate` chooses; infinity where no choice reaches the target."""
    best = np.zeros(1)
    for curve in curves:
        grown = np.full(len(best) + UNITS, np.inf)
        for point in curve:
            units = int(point.ratio * UNITS)
            # `part` is a view: the minimum is written into `grown`.
            part = grown[units : units + len(best)]
            np.minimum(part, best + point.loss, out=part)
        best = grown
    return float(best[int(target_replay * UNITS * len(curves)) :].min())


def allocate(curves: Sequence[Sequence[Point]], target_replay: float) -> tuple[Point, ...]:
    """Return one point per layer with the least total loss whose mean ratio reaches the target.

    Raises:
        InputError: no choice reaches the target.
    """
    needed = int(target_replay * UNITS * len(curves))
    enough = [entry for units, entry in frontier(curves).items() if units >= needed]
    if not enough:
        most = sum(max(p.ratio for p in curve) for curve in curves) / len(curves)
        raise InputError(f"a replay ratio of {target_replay:g} cannot be reached: the most is {most:.3f}")
    return _points(curves, min(enough)[1])


def allocate_budget(curves: Sequence[Sequence[Point]], max_loss: float) -> tuple[Point, ...]:
    """Return one point per layer with the greatest mean ratio whose total loss (log NLL) is at most `max_loss`.

    Raises:
        InputError: even the least loss is greater.
    """
    within = [(units, -loss, chosen) for units, (loss, chosen) in frontier(curves).items() if loss <= max_loss]
    if not within:
        raise InputError(f"no choice keeps the increase of the log NLL within {max_loss:g}")
    # More replay comes first. Of equal replay the smaller loss is taken.
    return _points(curves, max(within, key=lambda entry: entry[:2])[2])


def _points(curves: Sequence[Sequence[Point]], chosen: tuple[int, ...]) -> tuple[Point, ...]:
    return tuple(curve[index] for curve, index in zip(curves, chosen, strict=True))


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
