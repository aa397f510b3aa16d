"""Batches and prompts of benchmarks/decode.py: bytes, MACs, roofline, plan, thresholds of rows."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from speed.batch_plan import BatchPlan, Size
from speed.batch_rows import rows_of
from speed.engines import OURS
from speed.rows import quantile_thresholds
from speed.runner import Result
from speed.sizes import BATCH, PREFILL, Job, Sizes, Traffic
from speed.work import Part, Roofline, parts_of

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


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("coupled", [False, True])
def test_thresholds_let_the_share_pass(ratio: float, coupled: bool) -> None:
    """Of every layer, exactly."""
    scores = np.random.default_rng(1).normal(size=(4, 3, 8)).astype(np.float32)
    passed = scores >= quantile_thresholds(scores, ratio, coupled)[:, None]
    if coupled:
        passed = passed[:, :, :4] & passed[:, :, 4:]
    assert (passed.mean((0, 2)) == ratio).all()


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
