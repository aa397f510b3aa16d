"""The choice of thresholds: the allocation against brute force, and the search on decoders made of numbers."""

import math
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.errors import InputError
from fastcar_compile.gates import GATES
from fastcar_compile.tune.calibrate import expected
from fastcar_compile.tune.curves import HOPELESS, UNITS, LossCurves, Point, allocate, allocate_budget, least_loss
from fastcar_compile.tune.journal import Journal
from fastcar_compile.tune.rule import Measured
from fastcar_compile.tune.search import QUANTILES, TOLERANCE, Search

# The allocation against brute force.


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


# The search for thresholds, on a decoder made of numbers.


SCORES = (torch.linspace(0, 1, 1001), torch.linspace(0, 3, 1001))


class Numbers:
    """Two layers with the scores above, whose loss is their replay beyond 30 % times `cost`."""

    def __init__(self, cost: float, at_most: bool) -> None:
        self.cost, self.at_most = cost, at_most

    def measure(self, thresholds: tuple[float | None, ...], with_scores: bool = True) -> Measured:
        ratios = tuple(self.ratio(s, t) for s, t in zip(SCORES, thresholds, strict=True))
        return Measured(math.exp(self.cost * sum(max(0.0, r - 0.3) for r in ratios)), ratios, SCORES)

    def ratio(self, scores: torch.Tensor, threshold: float | None) -> float:
        if threshold is None:
            return 0.0
        return float(((scores <= threshold) if self.at_most else (scores >= threshold)).float().mean())


def searching(evaluator: Any, gate: str = "learned", layers: int = 2, spared: tuple[float, ...] = ()) -> Search:
    return Search(evaluator, GATES[gate], [True] * layers, Journal(None, ""), lambda _line: None, spared)


def search(gate: str, cost: float) -> Search:
    return searching(Numbers(cost, gate == "learned"), gate)


@pytest.mark.parametrize("gate", ["tas", "learned"])
@pytest.mark.parametrize("target", [0.4, 0.9])
def test_a_share_beyond_what_curves_follow_is_met(gate: str, target: float) -> None:
    """At a cost of 10 a curve ends near a share of 0.55."""
    one = search(gate, 10.0)
    found = one.outcome(one.for_replay(target))
    assert target <= found.replay <= target + TOLERANCE
    if gate == "tas":
        assert max(p.ratio for p in one.curves().for_loss(QUANTILES, math.inf)[0]) < 0.3 + HOPELESS / 10 + 0.15


class Certain(Numbers):
    """The dense decoder, or a replaying one, predicts every token for certain or rules one out."""

    def __init__(self, dense: float, replaying: float) -> None:
        super().__init__(1.0, True)
        self.dense, self.replaying = dense, replaying

    def measure(self, thresholds: tuple[float | None, ...], with_scores: bool = True) -> Measured:
        found = super().measure(thresholds, with_scores)
        return replace(found, nll=self.replaying if any(found.ratios) else self.dense)


@pytest.mark.parametrize(
    ("nll", "why"),
    [(0.0, "is 0: it predicts each token with certainty"), (math.inf, "is inf: its logits rule a token")],
)
def test_a_dense_likelihood_without_a_scale_is_refused(nll: float, why: str) -> None:
    with pytest.raises(InputError, match=f"the dense decoder's NLL on these videos {why}"):
        searching(Certain(nll, 1.0))


def test_a_replay_may_predict_with_certainty() -> None:
    one = searching(Certain(1.0, 0.0))
    assert one.outcome(one.for_loss(0.0)).replay == 1.0
    assert one.outcome(one.for_replay(0.5)).replay >= 0.5


def test_a_limit_spares_weights_and_not_just_replays() -> None:
    """Both layers cost the same, but a replay of the second one reads three quarters of its MLP in a draft."""
    limit, spared = 0.35, (1.0, 0.25)
    plain, net = searching(Numbers(1.0, True)), searching(Numbers(1.0, True), spared=spared)
    by_replay, by_weights = (one.outcome(one.for_loss(limit)) for one in (plain, net))
    assert by_weights.ratios[0] > 0.6 > 0.35 > by_weights.ratios[1]
    assert net.net(by_weights) > net.net(by_replay)
    assert by_weights.loss <= limit
    assert plain.net(by_replay) == by_replay.replay


def test_a_path_is_read_from_the_curves() -> None:
    """At no cost below 30 % the first shares are free; above, both layers cost the same."""
    one = search("tas", 1.0)
    values = one.path([0.3, 0.6, 1.0])
    measured = one.count
    replays = [one.outcome(v).replay for v in values]
    assert measured == 2 * len(QUANTILES), "both curves once"
    assert replays == pytest.approx([0.3, 0.6, 1.0], abs=0.12)
    assert [one.path([target]) for target in (0.3, 0.6, 1.0)] == [[v] for v in values]
    common = search("learned", 1.0).path([0.5])[0]
    assert common[0] == common[1], "layers that were trained together share one threshold"


def test_one_threshold_for_every_layer() -> None:
    """A score of 0.9 or less: 90 % of the first layer and 30 % of the second."""
    one = search("learned", 1.0)
    values = one.level(0.6)
    assert values[0] == values[1] == pytest.approx(0.9, abs=0.01)
    assert 0.6 <= one.outcome(values).replay <= 0.6 + TOLERANCE


class Lumps(Numbers):
    """Half of the first layer's scores are equal, and the second layer's replay costs ten times as much."""

    def measure(self, thresholds: tuple[float | None, ...], with_scores: bool = True) -> Measured:
        scores = (torch.linspace(0, 1, 1001).clamp(min=0.5), SCORES[1])
        first, second = (self.ratio(s, t) for s, t in zip(scores, thresholds, strict=True))
        return Measured(math.exp(self.cost * (first**2 + 10 * second**2)), (first, second), scores)


@pytest.mark.parametrize("target", [0.4, 0.6])
def test_calibrated_is_better_than_one_quantile_for_every_layer(target: float) -> None:
    one = searching(Lumps(0.1, True))
    uniform, found = one.outcome(one.uniform(target)), one.outcome(one.for_replay(target))
    assert uniform.replay >= target
    assert found.replay >= target
    assert found.loss < 0.95 * uniform.loss


def test_a_shift_leaves_what_never_or_always_replays() -> None:
    one = search("learned", 1.0)
    assert one.shifted((None, 1.5), 0.4)[0] is None
    always = GATES["learned"].comparison.always
    values = one.shifted((always, 1.5), 0.6)
    assert values[0] == always
    assert 0.6 <= one.outcome(values).replay <= 0.6 + TOLERANCE


@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
def test_a_shift_needs_few_measurements(target: float) -> None:
    """A layer that reaches its end makes the replay bend; a secant finds the target all the same."""
    one = searching(Numbers(1.0, True), "input_delta")
    measured = one.count
    found = one.shifted((one.at(0, 0.5), one.at(1, 0.6)), target)
    assert target <= one.outcome(found).replay <= target + TOLERANCE
    assert one.count - measured <= 3


# What other videos are expected to replay: left-out videos, the interval, and how many videos narrow it.


LEVELS = torch.linspace(0, 1, 2001)


class Population:
    """One layer. A video replays what its threshold passes, shifted by the video's own amount."""

    def __init__(self, amounts: np.ndarray) -> None:
        self.amounts = amounts

    def measure(self, thresholds: tuple[float | None, ...], with_scores: bool = True) -> Measured:
        (value,) = thresholds
        level = -math.inf if value is None else value
        shares = np.clip(level + self.amounts, 0, 1)
        return Measured(1.0, (float(shares.mean()),), (LEVELS,), tuple(shares.tolist()))


def test_the_interval_holds_the_share_of_other_videos() -> None:
    """Videos deviate by 0.08. The thresholds meet 0.5 on a few, and the others replay 0.5 minus these few's mean."""
    random, held, errors = np.random.default_rng(0), 0, []
    for _ in range(200):
        amounts = random.normal(0, 0.08, 6)
        one = searching(Population(amounts), layers=1)
        values = one.uniform(0.5)
        found = expected(one, values)
        assert found is not None
        level = values[0]
        assert level is not None
        held += found.low <= level <= found.high  # other videos' mean amount is zero, so they replay the threshold
        errors.append(found.replay - one.outcome(values).replay)
    assert 0.85 <= held / 200 <= 0.95
    assert np.abs(errors).max() < 0.002


def test_more_videos_narrow_the_interval() -> None:
    amounts = np.random.default_rng(0).normal(0, 0.08, 4)
    one = searching(Population(amounts), layers=1)
    few = expected(one, one.uniform(0.5))
    assert few is not None
    again = searching(Population(np.tile(amounts, few.videos_needed // 4 + 1)), layers=1)
    many = expected(again, again.uniform(0.5))
    assert many is not None
    assert few.high - few.low > 0.04 >= many.high - many.low
    assert many.videos_needed <= many.videos
    assert few.videos < few.videos_needed
    alone = searching(Population(amounts[:1]), layers=1)
    assert expected(alone, alone.uniform(0.5)) is None
