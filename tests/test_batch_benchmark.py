"""Batches and prompts of benchmarks/decode.py: bytes, MACs, roofline, plan, thresholds of rows, rows and tables."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from speed.batch_pages import batch_page, batch_text
from speed.batch_plan import BATCH_PEERS, BATCHES, COUPLED, PROMPTS, BatchPlan, Size, memory_of, together
from speed.batch_rows import Kept, rows_of
from speed.engines import OURS
from speed.plan import PEERS
from speed.rows import IndependentRows, quantile_thresholds
from speed.runner import Result
from speed.sizes import BATCH, PREFILL, Job, Sizes, Traffic, tokens_of
from speed.work import Part, Roofline, parts_of

from fastcar_compile.ir.types import StateRole

SMALL = Sizes(hidden=128, intermediate=256, layers=2, vocab=16, context=32, tokens_per_frame=16, longest=64)
TRAFFIC = Traffic(weights=1000, mlp=400, per_position=10, state=7)
PLAN = BatchPlan(SMALL, Path("c"), Path("f"))


def job(workload: str, number: int) -> Job:
    """Our first job of a size."""
    return PLAN.jobs("w8a8", Size(workload, number))[0]


def test_macs_and_bytes_of_a_batch_count_rows_that_compute_and_weights_that_are_read() -> None:
    """Half of the rows replay; in a quarter of the layers all do."""
    linears, attention = parts_of(job(BATCH, 4), TRAFFIC, 0.5, 0.25)
    head = 16 * 128
    assert linears == Part(1000 + 400 * 0.75, 4 * (2 * 4 * 128**2 + 2 * 3 * 128 * 256 * 0.5 + head))
    assert attention == Part(10 * 32 + 7, 4 * 2 * 2 * 128 * 32)


def test_a_prompt_reads_weights_once_and_attends_to_the_triangle() -> None:
    """One head; a token sees 32.5 tokens on average."""
    linears, attention = parts_of(job(PREFILL, 64), TRAFFIC, 0, 0)
    assert linears == Part(1400, 64 * (2 * 4 * 128**2 + 2 * 3 * 128 * 256) + 16 * 128)
    assert attention == Part(640, 2 * 2 * 128 * 64 * 65 / 2)


def test_the_roofline_adds_the_bounds_of_parts() -> None:
    """One part waits for memory, the other for arithmetic."""
    roof = Roofline(gigabytes=10, gigamacs=100)
    assert roof.milliseconds([Part(20e6, 1e6), Part(1e6, 300e6)]) == pytest.approx(2 + 3)
    assert roof.bound_by([Part(20e6, 1e6), Part(1e6, 300e6)]) == "arithmetic"
    assert roof.bound_by([Part(50e6, 1e6), Part(1e6, 300e6)]) == "memory"


def test_the_plan_has_every_size_and_compiles_little() -> None:
    """Pairs at even batches; one artifact for a batch of one and all prompts; a peer's files serve all sizes."""
    sizes = [*(Size(BATCH, n) for n in BATCHES), *(Size(PREFILL, n) for n in PROMPTS)]
    plan = replace(PLAN, sizes=Sizes(longest=max(PROMPTS)))
    groups = {s: plan.jobs(p, s) for p in PEERS for s in sizes}
    for size, jobs in groups.items():
        own = [j for j in jobs if j.engine == OURS]
        assert [j.coupled for j in own] == [False, True][
            : 2 if size.workload == BATCH and size.number in COUPLED else 1
        ]
        assert {j.kv for j in jobs} - {""} == {j.kv for j in jobs}
        assert {j.batch * j.prompt for j in jobs} == {size.number}
    assert {j.engine for p in PEERS for s in sizes for j in plan.jobs(p, s)} == {OURS, *(e for e, _ in _peers())}
    jobs = [j for s in sizes for j in plan.jobs("w4a8", s)]
    built: dict[str, set[str]] = {}
    for each in jobs:
        built.setdefault(each.folder, set()).add(json.dumps(each.built_from()))
    assert {folder: len(ways) for folder, ways in built.items()} == dict.fromkeys(built, 1)
    assert len([f for f in built if "ours" in f]) == len(BATCHES) + len(COUPLED)


def _peers() -> list[tuple[str, str]]:
    return [peer for peers in BATCH_PEERS.values() for peer in peers]


def test_engines_that_do_not_fit_together_are_opened_in_parts_with_ours() -> None:
    """Every peer once, ours in each part."""
    jobs = PLAN.jobs("float32", Size(BATCH, 8))
    own = [j for j in jobs if j.engine == OURS]
    peer = max(memory_of("float32", j) for j in jobs if j.engine != OURS)
    parts = together("float32", jobs, sum(memory_of("float32", j) for j in own) + 2 * peer)
    assert parts[0][: len(own)] == own
    assert all((part[0].engine, part[0].variants) == (OURS, ("dense",)) for part in parts[1:])
    assert [j for part in parts for j in part if j.engine != OURS] == jobs[len(own) :]
    assert len(parts) == 2
    assert together("float32", jobs, float("inf")) == [jobs]


def test_rows_decode_different_tokens_and_pairs_the_same() -> None:
    """Batch of four; a prompt counts on."""
    assert len(set(tokens_of(job(BATCH, 4), 3)[:, 0].tolist())) == 4
    pair = tokens_of(replace(job(BATCH, 4), coupled=True), 3)[:, 0].tolist()
    assert pair[:2] == pair[2:]
    assert pair[0] != pair[1]
    assert tokens_of(job(PREFILL, 64), 3)[0].tolist() == [(3 + i) % 16 for i in range(64)]


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("coupled", [False, True])
def test_thresholds_let_the_share_pass(ratio: float, coupled: bool) -> None:
    """Of every layer, exactly."""
    scores = np.random.default_rng(1).normal(size=(4, 3, 8)).astype(np.float32)
    passed = scores >= quantile_thresholds(scores, ratio, coupled)[:, None]
    if coupled:
        passed = passed[:, :, :4] & passed[:, :, 4:]
    assert (passed.mean((0, 2)) == ratio).all()


class _Stepper:
    """A decoder whose scores depend on the row's token, and on what was replayed before."""

    def __init__(self, rows: int) -> None:
        shape = (16, rows, 1)
        specs = [
            SimpleNamespace(name="y", role=StateRole.MLP_CACHE),
            SimpleNamespace(name="k", role=StateRole.KEY_CACHE),
        ]
        arrays = {"y": np.zeros(shape, np.float32), "k": np.zeros((rows, 1, 64, 1), np.float32)}
        self._state = SimpleNamespace(_specs=specs, arrays=arrays)

    def reset(self) -> None:
        """Forget everything."""
        for array in self._state.arrays.values():
            array[...] = 0

    def decode(self, tokens: np.ndarray, position: int, step: int, thresholds: np.ndarray) -> Any:
        """Score, decide, and keep what is computed."""
        y, k = self._state.arrays["y"], self._state.arrays["k"]
        k[:, 0, position] = tokens
        scores = np.sin(tokens[:, 0] * 7.0 + y[step % 16, :, 0] + k[:, 0, position - 16, 0])[None].astype(np.float32)
        decisions = (scores >= thresholds[:, None]) & (step >= 16)
        y[step % 16, ~decisions[0], 0] += 1
        return SimpleNamespace(scores=scores, decisions=decisions)


def test_rows_replay_on_their_own_about_as_often_as_asked() -> None:
    """The achieved share is near, rows differ, and the block before it is put back."""
    given = replace(job(BATCH, 8), sizes=replace(SMALL, layers=1, samples=2))
    stepper: Any = _Stepper(8)
    rows = IndependentRows(stepper, given, lambda at: tokens_of(given, 5 * at), 22)
    before = stepper._state.arrays["y"].copy()
    found = rows.found(0.5)
    assert found.decisions.shape == (10, 1, 8)
    assert abs(found.decisions.mean() - 0.5) < 0.07
    assert not (found.decisions == found.decisions[:, :, :1]).all()
    rows.restore()
    assert (stepper._state.arrays["y"] == before).all()
    assert (stepper._state.arrays["k"][:, 0, 10:16] == stepper._state.arrays["k"][:, 0, :6]).all()


def results(size: Size) -> list[Result]:
    """Ours dense and at 0.8, a peer that is twice as slow within a round, and one that failed."""
    jobs = {j.engine: j for j in reversed(PLAN.jobs("w8a8", size))}
    ran = {"traffic": TRAFFIC, "logits": [1.0], "version": "1"}
    own = replace(jobs[OURS], sizes=replace(jobs[OURS].sizes, samples=1))
    peer = replace(jobs["onnxruntime"], sizes=own.sizes)
    found = [
        Result(own, "dense", [2e-3, 8e-3, 4e-3], gigabytes=[10.0], gigamacs=[100.0], **ran),
        Result(peer, "dense", [4e-3, 16e-3, 12e-3], **ran),
        Result(jobs["openvino"], "dense", reason="ImportError: no openvino"),
    ]
    if size.workload == BATCH:
        found.append(Result(own, "0.8", [1e-3, 8e-3, 2e-3], replay=0.8, skipped=0.2, **ran))
    return found


def test_rows_have_ratios_within_rounds_and_what_the_roofline_allows() -> None:
    """A machine that slows down in round two changes no ratio."""
    rows = {(r["engine"], r["variant"]): r for r in rows_of("w8a8", [results(Size(BATCH, 8))], [1.0])}
    dense, replayed = rows[OURS, "dense"], rows[OURS, "0.8"]
    assert rows["onnxruntime", "dense"]["times_ours"] == 2
    assert replayed["times_dense"] == 2
    assert dense["ms"] == 4
    assert dense["tokens_per_second"] == 2000
    assert dense["bound_share"] == pytest.approx(dense["bound_ms"] / 4)
    assert replayed["macs"] < dense["macs"]
    assert replayed["bytes"] == dense["bytes"] - 400 * 0.2
    assert replayed["times_dense_possible"] == pytest.approx(dense["bound_ms"] / replayed["bound_ms"])
    assert rows["openvino", "dense"]["missing"] == "ImportError: no openvino"


def test_the_page_has_all_rows_and_names_what_is_missing(tmp_path: Path) -> None:
    """Summary, table, reasons and both pictures."""
    rows = [r for s in (Size(BATCH, 8), Size(PREFILL, 512)) for r in rows_of("w8a8", [results(s)], [1.0])]
    text = batch_text(rows)
    assert "| w8a8 | 2.00 (onnxruntime int8) | 2.00 (onnxruntime int8) |" in text
    assert "| w8a8, 0.8, independent | 2.00 (" in text
    assert "| batch 8 | fastcar_compile | w8a8 | 0.80 | 2 | 4000 |" in text
    assert "Missing: openvino int8, prefill 512: ImportError: no openvino" in text
    for folder in ("measurements", "images"):
        (tmp_path / folder).mkdir()
    batch_page(rows, tmp_path)
    assert all((tmp_path / "images" / f"batch_{n}.png").read_bytes()[1:4] == b"PNG" for n in ("roofline", "bars"))


def test_kept_rows_are_replaced_by_group_and_other_shapes_go(tmp_path: Path) -> None:
    """A second run of one size leaves the other; another decoder starts anew."""
    path = tmp_path / "rows.json"
    first = rows_of("w8a8", [results(Size(BATCH, 8)) + results(Size(PREFILL, 512))], [1.0])
    Kept(path).add(first)
    again = rows_of("w8a8", [results(Size(BATCH, 8))], [1.0])
    kept = Kept(path)
    kept.add([{**row, "ms": 9.0} for row in again])
    assert len(Kept(path).rows) == len(first)
    assert [r["ms"] == 9.0 for r in kept.rows] == [r["workload"] == BATCH for r in kept.rows]
    kept.add([{**row, "layers": 99} for row in again])
    assert len(kept.rows) == len(again)
    path.write_text(json.dumps([{**row, "machine": "another"} for row in again]))
    assert Kept(path).rows == []
