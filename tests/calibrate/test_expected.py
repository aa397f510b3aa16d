"""What other videos are expected to replay: left-out videos, the interval, and how many videos narrow it."""

import math
from typing import Any

import numpy as np
import torch

from fastcar_compile.gates import GATES
from fastcar_compile.tune.calibrate import expected
from fastcar_compile.tune.rule import Measurement
from fastcar_compile.tune.search import Journal, Search

SCORES = torch.linspace(0, 1, 2001)


class Population:
    """One layer. A video replays what its threshold passes, shifted by the video's own amount."""

    def __init__(self, amounts: np.ndarray) -> None:
        self.amounts = amounts

    def measure(self, thresholds: tuple[float | None, ...]) -> Measurement:
        (value,) = thresholds
        level = -math.inf if value is None else value
        shares = np.clip(level + self.amounts, 0, 1)
        return Measurement(1.0, (float(shares.mean()),), (SCORES,), tuple(shares.tolist()))


def search(amounts: np.ndarray) -> Search:
    population: Any = Population(amounts)
    return Search(population, GATES["learned"], [True], Journal(None, ""), lambda _line: None)


def test_the_interval_holds_the_share_of_other_videos() -> None:
    """Videos deviate by 0.08. The thresholds meet 0.5 on a few, and the others replay 0.5 minus these few's mean."""
    random, held, errors = np.random.default_rng(0), 0, []
    for _ in range(200):
        amounts = random.normal(0, 0.08, 6)
        one = search(amounts)
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
    one = search(amounts)
    few = expected(one, one.uniform(0.5))
    assert few is not None
    again = search(np.tile(amounts, few.videos_needed // 4 + 1))
    many = expected(again, again.uniform(0.5))
    assert many is not None
    assert few.high - few.low > 0.04 >= many.high - many.low
    assert many.videos_needed <= many.videos
    assert few.videos < few.videos_needed
    alone = search(amounts[:1])
    assert expected(alone, alone.uniform(0.5)) is None


def test_layers_that_never_replay_have_a_share_of_nothing() -> None:
    one = search(np.zeros(3))
    found = expected(one, one.closed)
    assert found is not None
    assert (found.replay, found.low, found.high, found.videos_needed) == (0.0, 0.0, 0.0, 2)
