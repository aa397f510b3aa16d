"""benchmarks/decode.py: the rows of a small run, the schedule and the bytes it counts."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from decode import QUICK  # noqa: E402
from speed.ours import schedule  # noqa: E402
from speed.plan import PEERS  # noqa: E402
from speed.sizes import GROUP  # noqa: E402

measured = pytest.mark.thorough(reason="a process for every engine")
KEYS = {"engine", "precision", "replay", "ms_per_token", "ms_min", "ms_max", "bytes_per_token", "bandwidth_share"}
OURS = "fastcar_compile"
TINY = replace(QUICK, hidden=128, intermediate=256, layers=2)
SHAPE = ("--hidden", str(TINY.hidden), "--intermediate", str(TINY.intermediate), "--layers", str(TINY.layers))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The 8-bit group of `--quick` on a tiny decoder, a pair of rows too, in a process, as a user runs it."""
    path = tmp_path_factory.mktemp("speed")
    command = [sys.executable, str(BENCHMARKS / "decode.py"), "--quick", "--precisions", "w8a8", *SHAPE]
    run = subprocess.run(
        [*command, "--json", str(path / "rows.json"), "--plot", str(path / "plot.png")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert (path / "plot.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((path / "rows.json").read_text())


def ours(rows: list[dict[str, Any]]) -> dict[float, dict[str, Any]]:
    """Our rows of one video by replay ratio."""
    return {r["replay"]: r for r in rows if r["engine"] == OURS and r["batch"] == 1}


@measured
def test_every_engine_has_rows_with_numbers_or_a_reason(rows: list[dict[str, Any]]) -> None:
    """Nothing is dropped: our ratios, and each peer measured or missing."""
    assert set(ours(rows)) == {0.0, 0.5, 0.8, 0.875}
    assert {r["replay"] for r in rows if r["batch"] == 2} == {0.0, 0.8}
    assert {(r["engine"], r["precision"]) for r in rows if r["engine"] != OURS} == set(PEERS["w8a8"])
    for row in rows:
        assert row.keys() >= KEYS
        if "missing" in row:
            assert row["ms_per_token"] is None
            assert row["missing"]
        else:
            assert 0 < row["ms_min"] <= row["ms_per_token"] <= row["ms_max"]
    assert all("missing" not in r for r in rows if r["engine"] in (OURS, "onnxruntime"))


@measured
def test_engines_compute_the_same_function(rows: list[dict[str, Any]]) -> None:
    """Logits after five tokens, against the first engine of the group."""
    assert all(r["cosine"] > 0.999 for r in rows if "missing" not in r)


@measured
def test_bytes_are_those_of_the_program(rows: list[dict[str, Any]]) -> None:
    """int8 weights and scales, float32 norms, int8 keys and values; the MLPs only where they are computed."""
    h, i, layers, vocab = TINY.hidden, TINY.intermediate, TINY.layers, TINY.vocab
    products = layers * (4 * h * (h + 4)) + vocab * (h + 4) + (layers + 1) * h * 4
    mlp = layers * (2 * i * (h + 4) + h * (i + 4) + h * 4)  # its norm is skipped with it
    cache = 2 * layers * (h + TINY.heads * -(-TINY.head_dim // 32)) * TINY.context
    for row in ours(rows).values():
        expected = products + cache + mlp * (1 - row["replay_achieved"])
        assert row["bytes_per_token"] == pytest.approx(expected, rel=0.03)  # RoPE, embedding rows, replay state
        share = row["bytes_per_token"] / row["ms_per_token"] / row["bandwidth_gb_s"] / 1e6
        assert row["bandwidth_share"] == pytest.approx(share, rel=1e-4)  # the bytes are rounded
    saved = ours(rows)[0.0]["bytes_per_token"] - ours(rows)[0.5]["bytes_per_token"]
    assert saved == pytest.approx(mlp / 2, abs=2)


@given(st.sampled_from([0.0, 0.2, 0.5, 0.8, 0.875, 1.0]), st.integers(1, 6), st.integers(1, 33))
def test_the_schedule_replays_the_ratio_evenly(ratio: float, groups: int, layers: int) -> None:
    """Every group of tokens has the nearest whole number, and its tokens differ by at most one."""
    chosen = schedule(ratio, groups * GROUP, layers)
    counts = chosen.sum(1).reshape(groups, GROUP)
    assert (counts.sum(1) == round(ratio * GROUP * layers)).all()
    assert counts.max() - counts.min() <= 1
    assert (chosen == schedule(ratio, groups * GROUP, layers)).all()
