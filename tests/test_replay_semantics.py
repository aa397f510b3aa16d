"""The rules of docs/explanation/replay.md against a plain Python reference; families/ has whole graphs."""

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

fastcar = torch.ops.fastcar
INF, LAYERS, BATCH = float("inf"), 2, 4


@dataclass
class Reference:
    """One layer's rule, word for word: no tensor operator of the package is used here."""

    frame: int
    batch: int
    max_chain: int | None = None
    couple: bool = False
    cache: dict[tuple[int, int], Any] = field(default_factory=dict)
    chain: dict[tuple[int, int], int] = field(default_factory=dict)

    def decide(self, t: int, scores: list[float], tau: float) -> list[bool]:
        slot = t % self.frame
        replay = []
        for row in range(self.batch):
            passes = t >= self.frame and scores[row] >= tau
            tired = self.max_chain is not None and self.chain.get((slot, row), 0) >= self.max_chain
            replay.append(passes and not tired)
        if self.couple:
            half = self.batch // 2
            replay = [replay[b % half] and replay[b % half + half] for b in range(self.batch)]
        return replay

    def step(self, t: int, scores: list[float], tau: float, computed: list[Any]) -> tuple[list[bool], list[Any]]:
        """Decisions, and the MLP output of every row, `computed` being what the MLP gives now."""
        replay = self.decide(t, scores, tau)
        for row, again in enumerate(replay):
            key = (t % self.frame, row)
            self.chain[key] = self.chain.get(key, 0) + 1 if again else 0
            self.cache[key] = self.cache[key] if again else computed[row]
        return replay, [self.cache[t % self.frame, row] for row in range(self.batch)]


@dataclass
class Operators:
    """The same layer out of the package's operators, wired as docs/reference/operators.md says."""

    frame: int
    batch: int
    max_chain: int | None = None
    couple: bool = False

    def __post_init__(self) -> None:
        self.cache = torch.zeros(self.frame, self.batch, 1)
        self.chain = torch.zeros(self.frame, self.batch, dtype=torch.int32)

    def step(self, t: int, scores: list[float], tau: float, computed: list[float]) -> tuple[list[bool], list[float]]:
        step, limit = torch.tensor([t]), -1 if self.max_chain is None else self.max_chain
        arguments = (torch.tensor(scores), torch.tensor([tau]), step, self.chain, self.frame, limit, self.couple)
        replay = fastcar.gate(*arguments)
        cached = fastcar.slot_read(self.cache, step)
        y = torch.where(replay[:, None], cached, torch.tensor(computed)[:, None])
        self.cache = fastcar.slot_write(self.cache, y, step)
        count = torch.where(replay, fastcar.slot_read(self.chain, step) + 1, 0)
        self.chain = fastcar.slot_write(self.chain, count.to(torch.int32), step)
        return replay.tolist(), y[:, 0].tolist()


@st.composite
def layers(draw: st.DrawFn) -> tuple[dict[str, Any], float, list[list[float]]]:
    """Options, a threshold, and scores [T][B] that often meet the threshold exactly."""
    couple = draw(st.booleans())
    batch = draw(st.sampled_from([2, 4]) if couple else st.integers(1, 4))
    max_chain = draw(st.none() | st.integers(0, 3))
    options = {"frame": draw(st.integers(1, 4)), "batch": batch, "max_chain": max_chain, "couple": couple}
    tau = draw(st.sampled_from([-INF, -1.0, 0.0, 0.5, INF]))
    score = st.sampled_from([-INF, -1.0, 0.0, 0.5, 0.75, INF, float("nan")])
    rows = st.lists(score, min_size=batch, max_size=batch)
    return options, tau, draw(st.lists(rows, max_size=14))


@settings(deadline=None)
@given(layers())
def test_operators_follow_the_reference(case: tuple[dict[str, Any], float, list[list[float]]]) -> None:
    options, tau, scores = case
    reference, operators = Reference(**options), Operators(**options)
    for t, row in enumerate(scores):
        computed = [float(1 + t * len(row) + b) for b in range(len(row))]
        assert operators.step(t, row, tau, computed) == reference.step(t, row, tau, computed)
        for (slot, b), count in reference.chain.items():
            assert operators.chain[slot, b] == count
            assert operators.cache[slot, b] == reference.cache[slot, b]
