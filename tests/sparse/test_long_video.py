"""The benchmark of long videos: its rows and its plot, on three frames of one video."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import check_module

ROOT = Path(__file__).resolve().parents[2]
FRAMES, FRAME, HEADS, DIM, LAYERS = 3, 256, 4, 32, 4


@pytest.mark.thorough  # a benchmark of several processes
def test_rows_and_plot(tmp_path: Path) -> None:
    check_module("matplotlib")
    script, out, plot = ROOT / "benchmarks" / "long_video.py", tmp_path / "rows.json", tmp_path / "plots" / "long.png"
    sizes = ["--frames", str(FRAMES), "--videos", "1", "--attention", "window 512, in cache", "--no-decode"]
    command = [sys.executable, str(script), *sizes, "--json", str(out), "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["frames"], found["videos"], found["decode"]) == (FRAMES, 1, [])
    rows = found["quality"]
    assert [r["chain"] for r in rows] == ["dense", "unlimited", "max_chain=4", "refresh_every=4"]
    assert {len(r["nll_by_frame"]) for r in rows} == {FRAMES}
    dense, *replayed = rows
    assert dense["replay_ratio"] == 0.0
    assert all(0.2 < r["replay_ratio"] < 0.9 for r in replayed)
    assert 0.0 < dense["nll_by_frame"][2] < 0.2  # nats; chance is 2.8
    rows_kept = 16 + 512 + FRAME - 1
    assert dense["kv_bytes_per_row"] == LAYERS * 2 * HEADS * rows_kept * DIM * 4
    assert plot.read_bytes().startswith(b"\x89PNG")
