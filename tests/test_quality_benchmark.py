"""benchmarks/quality.py: which sequences of play it uses, what its tables say, and the cases that it measures."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import imported

import fastcar_compile as fc
from fastcar_compile.gates import GateWeights
from fastcar_compile.tune.evaluate import load_cases

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    """The script and its decoders, as it imports them."""
    with imported([ROOT / "benchmarks"], ["quality", "subjects", "pages"]) as modules:
        yield modules


def split_of() -> Any:
    """Two maps, two episodes of 40 frames each. Shooting: ten frames of the first map, none of the second."""
    kinds = (np.arange(160) % 3).astype(np.uint8)
    kinds[60:70] = 3
    bounds = np.arange(0, 161, 40)
    bounds = np.stack([bounds[:-1], bounds[1:]], 1)

    def sequences(frames: int) -> np.ndarray:
        return np.concatenate([np.arange(first, end - frames + 1) for first, end in bounds])

    return SimpleNamespace(bounds=bounds, kinds=kinds, scenarios=("a", "a", "b", "b"), sequences=sequences)


def test_sequences_stay_in_their_episode_and_one_shows_shooting(benchmark: SimpleNamespace) -> None:
    split, subjects = split_of(), benchmark.subjects
    plain = subjects.spaced(split, 4, 8)
    chosen = subjects.spaced(split, 4, 8, rich=4)
    assert subjects.scenario_of(split, chosen).tolist() == ["a"] * 4 + ["b"] * 4
    assert plain[[0, 3, 4, 7]].tolist() == [0, 72, 80, 152], "from the first sequence of a map to its last"
    assert np.array_equal(plain[:3], chosen[:3])
    assert (split.kinds[chosen[3] : chosen[3] + 8] == subjects.KINDS.index("shooting")).sum() == 8
    for starts in (plain, chosen):
        assert (starts // 40 == (starts + 7) // 40).all()
    groups = subjects.groups_of(split, chosen, 8, 2)
    assert set(groups) == {*subjects.KINDS, "a", "b"}
    assert sum(groups[kind].sum() for kind in subjects.KINDS) == groups["a"].size == 8 * 6


def values(replay: float, nll: float) -> dict[str, Any]:
    common = {"replay_ratio": replay, "mlp_weights_spared": replay, "nll": nll, "nll_dense": 1.0}
    return common | {"token_agreement": 0.9, "psnr": 20.0, "ssim": 0.7}


def row(calibration: str, target: float | None, replay: float, nll: float) -> dict[str, Any]:
    """A row whose still frames cost nothing, and whose turning ones cost twice as much."""
    gate = "none" if calibration == "dense" else calibration.split(" ")[0]
    groups = {"still": values(replay, 1.0), "turning": values(replay, 2 * nll - 1)}
    names = {"decoder": "tiny", "gate": gate, "calibration": calibration, "target_replay": target, "groups": groups}
    return values(replay, nll) | names


def test_tables_follow_from_the_rows(benchmark: SimpleNamespace) -> None:
    quality = benchmark.quality
    measured = [row("dense", None, 0.0, 1.0), row("learned", 0.2, 0.2, 1.025), row("learned", 0.8, 0.8, 1.4)]
    measured += [row("learned within 1.05x", None, 0.4, 1.05), row("random", 0.8, 0.6, 1.5)]
    table = quality.rows_table(measured)
    assert "| tiny | dense |  | 0.0 % | 1.0000 | 1.00x | 90.00 % | 20.0 dB | 0.700 |" in table
    assert "| tiny | `learned` | 1.05x | 40.0 % | 1.0500 | 1.05x |" in table
    assert "| tiny | `random` | 80 % | 60.0 % |" in table
    assert "1.4000" not in table, "a point of the curve only"
    most = quality.most_table(measured)
    # 0.4 costs 1.05 and 0.8 costs 1.4: 1.10 is a seventh of the way. Turning costs twice as much, still frames nothing.
    assert "| tiny | `learned` | 40 % | 46 % | 80 % / 80 % | 20 % / 40 % |" in most
    assert "| tiny | `random` | 6 % | 12 % | 60 % / 60 % | 3 % / 6 % |" in most
    found = quality.weighted(measured[1], {"still": 0.1, "turning": 0.9, "walking": 0.5})
    assert found["nll"] == pytest.approx(0.1 * 1.0 + 0.9 * 1.05)
    assert found["psnr"] == pytest.approx(20.0)
    assert quality.weighted(measured[1], {}) == measured[1]


def test_a_table_replaces_the_one_between_its_markers(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("words\n\n<!-- rows: a command -->\n\nold\n\n<!-- end -->\n\nmore\n")
    text = benchmark.pages.markdown(("a", "b"), [(1, "x")])
    for _ in range(2):
        benchmark.pages.write_table(page, "rows", text)
    assert page.read_text() == (
        "words\n\n<!-- rows: a command -->\n\n| a | b |\n|---|---|\n| 1 | x |\n\n<!-- end -->\n\nmore\n"
    )
    with pytest.raises(SystemExit, match="no markers of 'most'"):
        benchmark.pages.write_table(page, "most", text)


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


def test_shipped_cases_of_the_game_fit_its_decoder(benchmark: SimpleNamespace) -> None:
    """Every gate of the page has its thresholds in the file, and those of the trained gates name their weights."""
    folder = ROOT / "examples" / "doom"
    config = json.loads((folder / "world" / "decoder" / "config.json").read_text())
    weights = GateWeights.load(folder / "gates" / "learned.safetensors")
    weights.check([config["hidden_size"]] * config["num_hidden_layers"])
    cases = load_cases(folder / "cases.json", weights)
    gates = ("tas, mean of heads", "tas, trained heads", "input_delta", "learned")
    limits = [f"{gate} within {limit:.2f}x" for gate in gates for limit in benchmark.quality.LIMITS]
    assert {case.calibration for case in cases} == {"dense", "random", *gates, *limits}
    replays = [case.replay for case in cases if case.replay is not None]
    assert {len(replay.thresholds(config["num_hidden_layers"])) for replay in replays} == {5}
