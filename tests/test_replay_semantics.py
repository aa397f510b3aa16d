"""The rules of docs/explanation/replay.md against a plain Python reference; families/ has whole graphs."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from agreement import thresholds_between
from hypothesis import given, settings
from hypothesis import strategies as st
from passes.tiny import FRAME, ROWS, VOCAB, TinyBlock, backend_of, captured

from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline

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


@cache
def program(max_chain: int | None = None, couple: bool = False) -> DecoderProgram:
    """A two-layer decoder, batch 4, rewritten."""
    item = InsertReplay((0.0,) * LAYERS, max_chain, couple)
    return run_pipeline(captured(*(TinyBlock,) * LAYERS, batch=BATCH), [*analysis_pipeline(), item])


def video(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, ROWS))


def run(source: DecoderProgram, thresholds: list[float], ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decisions and scores [T, L, B] of a whole video without a prompt."""
    backend, limits = backend_of(source), np.array(thresholds, np.float32)
    results = [backend.decode(ids[:, t : t + 1], t, t, limits) for t in range(ROWS)]
    return np.stack([r.decisions for r in results]), np.stack([r.scores for r in results])


def middling(ids: np.ndarray) -> list[float]:
    """Thresholds between the scores of the dense decoder, none of which is near one of them."""
    scores = run(program(), [INF] * LAYERS, ids)[1][FRAME:]
    thresholds = thresholds_between(scores)
    assert (np.abs(scores - thresholds[:, None]) > 5e-5).all()
    return thresholds.tolist()


def test_coupled_pairs_of_the_whole_graph_agree() -> None:
    ids = video(3)
    thresholds = middling(ids)
    first, second = np.split(run(program(None, False), thresholds, ids)[0], 2, axis=2)
    assert (first != second).any(), "without coupling the pairs of this video disagree"
    first, second = np.split(run(program(None, True), thresholds, ids)[0], 2, axis=2)
    assert first.any()
    np.testing.assert_array_equal(first, second)
