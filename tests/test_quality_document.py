"""docs/measurements/quality.md: its verdicts follow from the rows, and the shipped cases fit their decoders."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import imported

import fastcar_compile as fc
from fastcar_compile.gates import GateWeights
from fastcar_compile.tune.evaluate import load_cases

ROOT = Path(__file__).parents[1]


def row(gate: str, calibration: str, target: float | None, replay: float, nll: float, window: str = "none") -> dict:
    return {
        "gate": gate, "calibration": calibration, "sparse_attention": window, "target_replay": target,
        "replay_ratio": replay, "replay_ratio_all_forwards": replay * 7 / 8, "replay_by_layer": [replay, replay],
        "nll": nll, "nll_dense": 0.1, "nll_by_frame": [0.5, nll, nll, nll + (0.2 if gate == "none" else 0.0)],
        "token_agreement": 0.99, "psnr": 20.0, "ssim": 0.9,
    }  # fmt: skip


def bounds(document: Any) -> list[Any]:
    """In hindsight 80 % is possible and 85 % is not."""
    return [document.Found(0.8, 0.801, (0.9, 0.702), 0.105, 0.1), document.Found(0.85, 0.852, (0.95, 0.754), 0.13, 0.1)]


@pytest.fixture
def document() -> Iterator[Any]:
    with imported([ROOT / "benchmarks"], ["replay_quality.document"]) as modules:
        yield modules.document


def test_verdicts_follow_from_the_rows(document: Any, tmp_path: Path) -> None:
    rows = [
        row("none", "dense", None, 0.0, 0.1), row("tas", "calibrated", 0.5, 0.51, 0.117),
        row("tas", "uniform", 0.5, 0.50, 0.2), row("learned", "calibrated", 0.8, 0.81, 0.105),
        row("learned", "uniform", 0.8, 0.80, 0.104), row("learned", "calibrated", 0.85, 0.84, 0.11),
        row("learned", "calibrated", 0.9, 0.84, 0.11), row("learned", "uniform", 0.9, 0.91, 0.12),
        row("learned", "calibrated", 0.95, 0.95, 0.15), row("learned", "uniform", 0.95, 0.95, 0.15),
        row("random", "random", 0.5, 0.50, 0.3), row("random", "random", 0.8, 0.80, 0.5),
        row("none", "dense", None, 0.0, 0.2, "window 9, sinks 1"),
        row("tas", "calibrated", 0.5, 0.51, 0.3, "window 9, sinks 1"),
    ]  # fmt: skip
    document.write_document(
        tmp_path / "quality.md", {"tiny": rows}, {"tiny": bounds(document)}, {"tiny": {"float32": 0.1, "int8": 0.2}}
    )
    text = (tmp_path / "quality.md").read_text()
    assert "| tiny | 85 % | 85.2 % | 95 / 75 % | 1.30x | 1.2x: **out of reach** |" in text
    assert "| tiny | `learned` | 80 % | 81.0 % | 1.1x | 1.05x | +0.0050 | reached |" in text
    assert "| tiny | `learned` | 85 % | 84.0 % | 1.2x | 1.10x | +0.0100 | **not reached** |" in text, "too little"
    worse = "**not** better than uniform at 80 % (0.1050 and 0.1040, 81.0 % against 80.0 % replayed)"
    same = "the same decisions as uniform at 95 % (0.1500 and 0.1500, 95.0 % against 95.0 % replayed)"
    far = "not comparable with uniform at 90 % (0.1100 and 0.1200, 84.0 % against 91.0 % replayed)"
    assert f"- tiny, `learned`: calibrated is better than uniform and random at 85 %; {worse}; {far}; {same}." in text
    line = "| tiny | window 9, sinks 1 | `tas` | 51 % | 0.3000 | 0.2000 | 0.3000 | 0.4000 | the last frame |"
    assert line in text
    assert "Replay with a window beats the same window alone in 1 of 1 rows." in text
    assert (
        "| `tas` | calibrated | full | 51.0 % (44.6 %) | 0.1170 | +0.0170 | 1.17x | 99.00 % | 20.0 dB | 0.900 |" in text
    )


def test_the_committed_page_begins_as_the_generator_writes_it(document: Any) -> None:
    committed = (ROOT / "docs" / "measurements" / "quality.md").read_text()
    assert committed.startswith(document._HEAD)


@pytest.mark.parametrize("name", ["moving_shapes", "bouncing_digits", "moving_shapes/tuned", "bouncing_digits/tuned"])
def test_shipped_cases_fit_their_decoder(name: str) -> None:
    folder = ROOT / "examples" / name
    config = json.loads((folder / "model" / "config.json").read_text())
    weights = GateWeights.load(folder / "gates" / "learned.safetensors")
    weights.check([config["hidden_size"]] * config["num_hidden_layers"])
    cases = load_cases(folder / "cases.json", weights)
    trained = fc.TrainedGate.load(folder / "gates" / "tas.safetensors")
    found = {(c.gate, c.calibration) for c in cases}
    gates = ("tas", "learned") if name.endswith("tuned") else ("input_delta", "tas", "learned")
    expected = {(g, c) for g in gates for c in ("calibrated", "uniform")}
    assert found == {("none", "dense"), ("random", "random"), *expected}
    for case in (c for c in cases if c.replay is not None):
        assert case.replay is not None
        assert len(case.replay.thresholds(config["num_hidden_layers"])) == config["num_hidden_layers"]
        heads = [h for layer in case.replay.heads_of(config["num_hidden_layers"]) for h, _ in layer or ()]
        assert (case.gate == "tas") == bool(heads)
        assert case.replay.heads == (trained.replay_config().heads if heads else None)
        assert all(head < config["num_attention_heads"] for head in heads)
