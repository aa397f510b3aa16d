"""The allocation against brute force."""

import math
from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.errors import InputError
from fastcar_compile.tune.curves import UNITS, LossCurves, Point, allocate, allocate_budget, least_loss

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
        assert least_loss(given_curves, target) == math.inf
        return
    chosen = allocate(given_curves, target)
    assert all(p in curve for p, curve in zip(chosen, given_curves, strict=True))
    assert cost(chosen)[1] >= needed
    assert cost(chosen)[0] == min(enough) == least_loss(given_curves, target)


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


SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
steps = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 6)), min_size=len(SHARES), max_size=len(SHARES))
"""Of a curve: how much the ratio grows, in units, and the loss, in thirty-seconds, so that no curve is hopeless."""


def grown(each: list[tuple[int, int]]) -> list[Point]:
    sums = accumulate(each, lambda total, step: (total[0] + step[0], total[1] + step[1]))
    return [Point(share, units / UNITS, parts / 32) for share, (units, parts) in zip(SHARES, sums, strict=True)]


@settings(deadline=None)
@given(st.lists(steps.map(grown), min_size=1, max_size=4), st.integers(0, 20), st.integers(0, 60))
def test_curves_that_end_early_give_the_same_choice(full: list[list[Point]], twentieths: int, parts: int) -> None:
    """Whole curves and those that end where no choice can use them."""
    target, budget = twentieths / 20, parts / 32
    closed = Point(None, 0.0, 0.0)
    whole = [[closed, *curve] for curve in full]

    def curves() -> LossCurves:
        return LossCurves(lambda layer, share: full[layer][SHARES.index(share)], [True] * len(full))

    assert least_loss(curves().for_replay(SHARES, target), target) == least_loss(whole, target)
    if least_loss(whole, target) < math.inf:
        assert allocate(curves().for_replay(SHARES, target), target) == allocate(whole, target)
    assert allocate_budget(curves().for_loss(SHARES, budget), budget) == allocate_budget(whole, budget)
