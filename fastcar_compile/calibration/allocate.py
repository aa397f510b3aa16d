"""Which layer replays how much: dynamic programming over measured damage curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastcar_compile.errors import InputError

UNITS = 1000
"""Ratios are counted in thousandths, rounded down, so that a target that is met on paper is met in fact."""


@dataclass(frozen=True)
class Point:
    """One threshold of one layer: the share of its forwards that replays, and what that costs in log NLL."""

    threshold: float | None
    ratio: float
    damage: float


def frontier(curves: Sequence[Sequence[Point]]) -> dict[int, tuple[float, tuple[int, ...]]]:
    """For every reachable sum of ratios the least total damage, and the points that give it.

    Args:
        curves: per layer its points.

    Returns:
        Sum of the layers' ratios in units -> (damage, index of the point per layer).
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for curve in curves:
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for units, (damage, chosen) in best.items():
            for index, point in enumerate(curve):
                key = units + int(point.ratio * UNITS)
                candidate = (damage + point.damage, (*chosen, index))
                if key not in grown or candidate < grown[key]:
                    grown[key] = candidate
        best = grown
    return best


def allocate(curves: Sequence[Sequence[Point]], target_replay: float) -> tuple[Point, ...]:
    """The points of least total damage whose mean ratio reaches the target.

    Raises:
        InputError: no choice reaches it.
    """
    needed = int(target_replay * UNITS * len(curves))
    enough = [entry for units, entry in frontier(curves).items() if units >= needed]
    if not enough:
        most = sum(max(p.ratio for p in curve) for curve in curves) / len(curves)
        raise InputError(f"a replay ratio of {target_replay:g} cannot be reached: the most is {most:.3f}")
    return _points(curves, min(enough)[1])


def allocate_budget(curves: Sequence[Sequence[Point]], max_damage: float) -> tuple[Point, ...]:
    """The points of greatest mean ratio whose total damage (log NLL) is within the budget.

    Raises:
        InputError: even the least damage is beyond it.
    """
    within = [(units, -damage, chosen) for units, (damage, chosen) in frontier(curves).items() if damage <= max_damage]
    if not within:
        raise InputError(f"no choice stays within a damage of {max_damage:g}")
    return _points(curves, max(within, key=lambda entry: entry[:2])[2])


def _points(curves: Sequence[Sequence[Point]], chosen: tuple[int, ...]) -> tuple[Point, ...]:
    return tuple(curve[index] for curve, index in zip(curves, chosen, strict=True))
