"""What other videos are expected to replay: left-out videos, the interval, and how many videos narrow it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fastcar_compile.gates import GATES
from fastcar_compile.tune.calibrate import batch_rows, expected, some_of, student
from fastcar_compile.tune.evaluator import Kept
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


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 6.314), (2, 2.920), (3, 2.353), (7, 1.895), (30, 1.697)])
def test_students_quantiles(freedom: int, quantile: float) -> None:
    """Of 95 %, from tables."""
    assert student(freedom) == pytest.approx(quantile, abs=0.004)


def test_some_videos_stand_for_many() -> None:
    videos = np.arange(20)[:, None].repeat(4096, 1)
    assert some_of(videos, coupled=False, tokens=16384)[:, 0].tolist() == [0, 5, 10, 15]
    assert some_of(videos, coupled=True, tokens=16384)[:, 0].tolist() == [0, 5, 10, 15]
    assert some_of(videos[:6], coupled=True, tokens=16384)[:, 0].tolist() == [0, 1, 3, 4]
    assert len(some_of(videos[:3], coupled=False, tokens=16384)) == 3
    assert some_of(videos, coupled=False, tokens=16384, wanted=2)[:, 0].tolist() == [0, 10]
    assert some_of(videos, coupled=True, tokens=16384, wanted=1)[:, 0].tolist() == [0, 10]
    assert len(some_of(videos, coupled=False, tokens=16384, wanted=21)) == 20
    assert [batch_rows(count, 256, coupled=False) for count in (1, 2, 4, 5, 32)] == [1, 2, 2, 2, 2]
    assert [batch_rows(count, 100, coupled=True) for count in (2, 6, 16)] == [2, 4, 4]
    assert [batch_rows(4, chunk, coupled=False) for chunk in (1, 101, 256, 4096)] == [4, 4, 2, 1]


def test_a_store_forgets_what_was_not_used_for_longest() -> None:
    store: Kept[str] = Kept(10)
    store.put((1.0,), "a", 4)
    store.put((2.0,), "b", 4)
    assert store.get((1.0,)) == "a"
    store.put((3.0,), "c", 4)
    assert [store.get(key) for key in ((1.0,), (2.0,), (3.0,))] == ["a", None, "c"]
    store.put((4.0, None), "d", 99)
    assert [store.get(key) for key in ((1.0,), (4.0, None))] == [None, "d"]
    store.drop(lambda key: len(key) > 1)
    assert store.get((4.0, None)) is None
