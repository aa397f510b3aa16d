"""benchmarks/decode.py: the rows of a small run, the schedule, the bytes it counts, and a peer that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import decode  # noqa: E402
from decode import QUICK, parse  # noqa: E402
from speed.ours import schedule  # noqa: E402
from speed.plan import KV, PEERS, Plan  # noqa: E402
from speed.report import cosine, rows_of, speedups, table  # noqa: E402
from speed.runner import Result, run_group  # noqa: E402
from speed.sizes import GROUP, Job, Sizes, Traffic  # noqa: E402

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
        [*command, "--json", str(path / "rows.json"), "--plot", str(path / "plot.png")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert (path / "plot.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((path / "rows.json").read_text())


def ours(rows: list[dict[str, Any]]) -> dict[float, dict[str, Any]]:
    """Our rows of one video by replay ratio."""
    return {r["replay"]: r for r in rows if r["engine"] == OURS and r["batch"] == 1}


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


def test_engines_compute_the_same_function(rows: list[dict[str, Any]]) -> None:
    """Logits after five tokens, against the first engine of the group."""
    assert all(r["cosine"] > 0.999 for r in rows if "missing" not in r)


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


def test_sixteen_layers_make_the_published_ratios_exact() -> None:
    """0.5, 0.8 and 0.875 at the default shape."""
    assert [schedule(r, 2 * GROUP, Sizes().layers).mean() for r in (0.5, 0.8, 0.875)] == [0.5, 0.8, 0.875]


def test_an_engine_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    """The exception's own text, and a line below the table."""
    job = Job("pytorch eager", "float8", QUICK, str(tmp_path / "nothing"), str(tmp_path / "job"), max_seq_len=0)
    (row,) = rows_of(run_group([job], lambda _text: None), [], 0.0)
    assert row["missing"] == "KeyError: 'float8'"
    assert row["ms_per_token"] is None
    assert "Missing: pytorch eager float8: KeyError: 'float8'" in table([row])


def test_a_table_without_bandwidth_says_so() -> None:
    """Our engine measures it; where that is missing, peers keep their times."""
    result = Result(Job("openvino", "int4", QUICK, "", ""), "dense", [2e-3], traffic=Traffic(1e6, 0, 0), logits=[1.0])
    row = rows_of([result], [1.0], 0.0)[0]
    assert row["bandwidth_share"] is None
    assert "| openvino | int4 | 0 | 2 | 2 - 2 | 1 | not measured |  |" in table([row])


def test_rounds_have_medians_of_their_own() -> None:
    """Two samples each, in the order in which they were taken."""
    job = Job("openvino", "int4", replace(QUICK, samples=2), "", "")
    row = rows_of([Result(job, "dense", [1e-3, 3e-3, 5e-3, 9e-3], traffic=Traffic(1, 0, 0), logits=[1.0])], [1.0], 0.0)[
        0
    ]
    assert row["rounds_ms"] == [2.0, 7.0]


def test_a_window_bounds_the_bytes() -> None:
    """Beyond the window the context costs nothing more."""
    traffic = Traffic(weights=100, mlp=50, per_position=2, state=3)
    assert traffic.bytes(10, 0.5) == 100 + 25 + 20 + 3
    assert replace(traffic, window=4).bytes(10, 0) == 100 + 50 + 8 + 3


def test_the_plan_has_every_peer_of_the_issue() -> None:
    """Batch 2, longer caches and float16 keys and values too."""
    jobs = [j for p in PEERS for j in Plan(Sizes(), Path("c"), Path("f")).jobs(p)]
    own = {(j.batch, j.sizes.context, j.max_seq_len, j.window) for j in jobs if j.engine == OURS}
    caches = {(j.precision, j.kv) for j in jobs if j.engine == OURS}
    assert caches == set(KV.items()) | {("w4a8", "float16")}
    assert all(j.kv for j in jobs)
    lengths = {(1, 512, n, 0) for n in (1024, 2048, 4096)}
    assert own == lengths | {(2, 512, 1024, 0), (1, 2048, 2304, 0), (1, 2048, 2304, 256)}
    assert {j.engine for j in jobs} == {OURS, "pytorch eager", "torch.compile", "onnxruntime", "openvino", "llama.cpp"}
    assert len({j.folder for j in jobs}) == len(jobs)


def test_sentences_compare_with_the_own_dense_step_and_the_fastest_peer() -> None:
    """Replay, a window and a longer cache against dense; the slower peer is not named."""
    plain = {"batch": 1, "context": 512, "max_seq_len": 1024, "window": 0, "replay": 0.0}
    plain |= {"replay_achieved": 0.0, "kv": "int8"}
    mine = {"engine": OURS, "precision": "w4a8", "ms_per_token": 20.0, "rounds_ms": [20.0, 30.0, 10.0], **plain}
    some = {"replay": 0.8, "replay_achieved": 0.8}
    rows = [mine, {**mine, **some, "ms_per_token": 10.0, "rounds_ms": [10.0, 12.0, 5.5]}, {**mine, "max_seq_len": 2048}]
    wide = {**mine, "kv": "float16", "ms_per_token": 24.0, "rounds_ms": [24.0]}
    rows += [wide, {**wide, **some, "ms_per_token": 16.0, "rounds_ms": [16.0]}]
    for name, milliseconds in (("openvino", 30.0), ("onnxruntime", 25.0)):
        precision = "int4" if name == "openvino" else "int4 block 32"
        rows.append({**plain, "engine": name, "precision": precision, "ms_per_token": milliseconds})
    assert speedups(rows) == [
        "w4a8, context 512, replay 0.800: 2.00x its own dense step (2.00x within a round)",
        "w4a8, context 512, max_seq_len 2048: 1.00x its own dense step (1.00x within a round)",
        "w4a8, context 512, float16 KV, replay 0.800: 1.50x its own dense step (1.50x within a round)",
        "w4a8, dense: 1.25x the fastest peer (onnxruntime int4 block 32)",
    ]


def test_an_interrupted_run_keeps_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the second group: the rows of the first one are printed and in the file."""

    def stand_in(jobs: list[Job], _say: object) -> list[Result]:
        if jobs[0].precision != "float32":
            raise KeyboardInterrupt
        return [Result(jobs[0], "dense", [2e-3], traffic=Traffic(1e6, 0, 0), logits=[1.0])]

    monkeypatch.setattr(decode, "run_group", stand_in)
    monkeypatch.setattr(decode, "checkpoint", lambda *_: tmp_path)
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["decode.py", "--quick", "--json", str(file), "--folder", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        decode.main()
    (row,) = json.loads(file.read_text())
    assert (row["engine"], row["precision"], row["ms_per_token"]) == (OURS, "float32", 2.0)
    assert "| fastcar_compile | float32 | 0 | 2 |" in capsys.readouterr().out


def test_the_first_row_of_a_batch_is_compared() -> None:
    """The reference has one row; both rows of a pair decode other tokens."""
    job = Job("openvino", "int4", QUICK, "", "", batch=2)
    pair = Result(job, "dense", [1e-3], traffic=Traffic(1, 0, 0), logits=[1.0, 2.0, -3.0, 0.5])
    (row,) = rows_of([pair], [1.0, 2.0], 0.0)
    assert row["cosine"] == pytest.approx(1.0)


def test_an_unknown_precision_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is measured."""
    monkeypatch.setattr(sys, "argv", ["decode.py", "--precisions", "w2a8"])
    with pytest.raises(SystemExit):
        parse()
    assert "unknown precision 'w2a8'; known: float32, bfloat16, w8a8, w4a8" in capsys.readouterr().err


def test_cosine() -> None:
    """Of vectors at 45 degrees."""
    assert cosine([1, 0], [1, 1]) == pytest.approx(np.sqrt(0.5))
