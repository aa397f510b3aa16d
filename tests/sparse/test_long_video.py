"""The benchmark of long videos: its rows and its plot, on three frames of one video."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from conftest import check_module

FRAMES, HEADS, DIM, LAYERS = 3, 4, 32, 4


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    check_module("matplotlib")
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "long_video.py"
    spec = importlib.util.spec_from_file_location("long_video", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_and_plot(benchmark: ModuleType, tmp_path: Path) -> None:
    video = benchmark.make_videos(1, benchmark.HELD_OUT_SEED, FRAMES)
    tokens = benchmark.with_bos(benchmark.tokenize(video))
    name = "window 512, in cache"
    rows = benchmark.quality_rows(tokens, {name: benchmark.ATTENTIONS[name]})
    assert [r["chain"] for r in rows] == ["dense", "unlimited", "max_chain=4", "refresh_every=4"]
    assert {len(r["nll_by_frame"]) for r in rows} == {FRAMES}
    dense, *replayed = rows
    assert dense["replay_ratio"] == 0.0
    assert all(0.2 < r["replay_ratio"] < 0.9 for r in replayed)
    assert 0.0 < dense["nll_by_frame"][2] < 0.2  # the second frame costs most, the third is known
    capacity = 16 + 512 + benchmark.TOKENS_PER_FRAME - 1
    assert dense["kv_bytes_per_row"] == LAYERS * 2 * HEADS * capacity * DIM * 4
    timed = {"attention": name, "replay_ratio": 0.0, "kv_bytes": 1, "ms_per_token_by_frame": [1.0]}
    benchmark.plot(rows, [timed], tmp_path / "plots" / "long.png")
    assert (tmp_path / "plots" / "long.png").read_bytes().startswith(b"\x89PNG")
