"""The cases that benchmarks/quality.py measures fit the shipped decoders."""

import json
from pathlib import Path

import pytest

import fastcar_compile as fc
from fastcar_compile.gates import GateWeights
from fastcar_compile.tune.evaluate import load_cases

ROOT = Path(__file__).parents[1]


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


def test_shipped_cases_of_the_game_fit_its_decoder() -> None:
    """Every gate of the page has its thresholds in the file, and those of the trained gates name their weights."""
    folder = ROOT / "examples" / "doom"
    config = json.loads((folder / "world" / "decoder" / "config.json").read_text())
    weights = GateWeights.load(folder / "gates" / "learned.safetensors")
    weights.check([config["hidden_size"]] * config["num_hidden_layers"])
    cases = load_cases(folder / "cases.json", weights)
    gates = ("tas, mean of heads", "tas, trained heads", "input_delta", "learned")
    limits = [f"{gate} within {limit}" for gate in gates for limit in ("1.05x", "1.10x")]
    assert {case.calibration for case in cases} == {"dense", "random", *gates, *limits}
    replays = [case.replay for case in cases if case.replay is not None]
    assert {len(replay.thresholds(config["num_hidden_layers"])) for replay in replays} == {5}
