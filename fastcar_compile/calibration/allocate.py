"""Dynamic programming over measured loss curves: how much each layer replays."""

from __future__ import annotations

from collections.abc import Sequence
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
