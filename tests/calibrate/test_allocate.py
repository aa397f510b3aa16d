"""The allocation against brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.calibration.allocate import UNITS, Point, allocate, allocate_budget
from fastcar_compile.errors import InputError

ratios = st.integers(0, UNITS).map(lambda n: n / UNITS)
losses = st.integers(-3, 40).map(lambda n: n / 8)
"""Eighths add up exactly, so that the order of summation decides nothing."""
points = st.builds(Point, st.none() | st.floats(-1, 1), ratios, losses)
curves = st.lists(st.lists(points, min_size=1, max_size=4), min_size=1, max_size=4)


def cost(chosen: tuple[Point, ...]) -> tuple[float, int]:
    return sum(p.loss for p in chosen), sum(int(p.ratio * UNITS) for p in chosen)


@settings(deadline=None)
@given(curves, st.integers(0, 20).map(lambda n: n / 20))
def test_least_loss_for_a_ratio(given_curves: list[list[Point]], target: float) -> None:
    needed = int(target * UNITS * len(given_curves))
    enough = [cost(c)[0] for c in product(*given_curves) if cost(c)[1] >= needed]
    if not enough:
        with pytest.raises(InputError, match="cannot be reached: the most is"):
            allocate(given_curves, target)
        return
    chosen = allocate(given_curves, target)
    assert all(p in curve for p, curve in zip(chosen, given_curves, strict=True))
    assert cost(chosen)[1] >= needed
    assert cost(chosen)[0] == min(enough)


@settings(deadline=None)
@given(curves, losses)
def test_greatest_ratio_within_a_budget(given_curves: list[list[Point]], budget: float) -> None:
    within = [cost(c)[1] for c in product(*given_curves) if cost(c)[0] <= budget]
    if not within:
        with pytest.raises(InputError, match="no choice keeps the increase of the log NLL within"):
            allocate_budget(given_curves, budget)
        return
    chosen = allocate_budget(given_curves, budget)
    assert cost(chosen)[0] <= budget
    assert cost(chosen)[1] == max(within)


def test_a_fixed_case() -> None:
    """One layer is free up to 0.9, the other expensive: the target of 0.5 takes 0.9 of the one, 0.1 of the other."""
    free = [Point(None, 0.0, 0.0), Point(0.4, 0.5, 0.0), Point(0.9, 0.9, 0.01)]
    dear = [Point(None, 0.0, 0.0), Point(0.1, 0.1, 0.2), Point(0.5, 0.5, 3.0)]
    assert [p.threshold for p in allocate([free, dear], 0.5)] == [0.9, 0.1]
    assert [p.threshold for p in allocate_budget([free, dear], 0.1)] == [0.9, None]
