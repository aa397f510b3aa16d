"""docs/measurements/doom.md: which sequences are used, what its numbers say, and the files that it measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import check_module, imported

from fastcar_compile.gates import GateWeights
from fastcar_compile.tune.evaluate import load_cases

ROOT = Path(__file__).parents[1]
NAMES = (
    "setup", "sequences", "stages", "curves", "document", "document_tables", "document_text", "pictures", "weighting",
)  # fmt: skip


@pytest.fixture(scope="module")
def study() -> Iterator[SimpleNamespace]:
    """The study's modules, as its script imports them."""
    check_module("vector_quantize_pytorch")
    with imported([ROOT / "benchmarks", ROOT / "examples"], [f"replay_doom.{name}" for name in NAMES]) as modules:
        yield modules


def split_of(study: SimpleNamespace) -> Any:
    """Two maps, two episodes of 40 frames each. Shooting: ten frames of the first map, none of the second."""
    kinds = (np.arange(160) % 3).astype(np.uint8)
    kinds[60:70] = study.sequences.SHOOTING
    bounds = np.arange(0, 161, 40)
    tokens = np.arange(160 * 65, dtype=np.int16).reshape(160, 65)
    bounds = np.stack([bounds[:-1], bounds[1:]], 1)
    return study.setup.TokenSplit(tokens, bounds, kinds, ("a", "a", "b", "b"))


def test_sequences_stay_in_their_episode_and_one_shows_shooting(study: SimpleNamespace) -> None:
    split = split_of(study)
    plain = study.sequences.spaced(split, 4, 8)
    chosen = study.sequences.spaced(split, 4, 8, rich=4)
    assert study.sequences.scenario_of(split, chosen).tolist() == ["a"] * 4 + ["b"] * 4
    assert plain[[0, 3, 4, 7]].tolist() == [0, 72, 80, 152], "from the first sequence of a map to its last"
    assert np.array_equal(plain[:3], chosen[:3])
    assert (split.kinds[chosen[3] : chosen[3] + 8] == study.sequences.SHOOTING).sum() == 8
    for starts in (plain, chosen):
        assert (starts // 40 == (starts + 7) // 40).all()


def test_shipped_cases_fit_their_decoder(study: SimpleNamespace) -> None:
    """Every gate of the page has its thresholds in the file, and those of the trained gates name their weights."""
    folder = ROOT / "examples" / "doom"
    config = json.loads((folder / "world" / "decoder" / "config.json").read_text())
    weights = GateWeights.load(folder / "gates" / "learned.safetensors")
    weights.check([config["hidden_size"]] * config["num_hidden_layers"])
    cases = load_cases(folder / "cases.json", weights)
    setup, within = study.setup, study.stages.within
    gates = (setup.MEAN, setup.HEADS, setup.DELTA, setup.LEARNED)
    expected = {gate.name for gate in gates} | {within(gate, limit) for gate in gates for limit in setup.LIMITS}
    assert {case.calibration for case in cases} == {"dense", "random", *expected}
    replays = [case.replay for case in cases if case.replay is not None]
    assert {len(replay.thresholds(config["num_hidden_layers"])) for replay in replays} == {5}


def values(replay: float, nll: float) -> dict[str, Any]:
    common = {"replay_ratio": replay, "replay_by_layer": [replay, replay], "nll": nll, "nll_dense": 1.0}
    return common | {"token_agreement": 0.9, "psnr": 20.0, "ssim": 0.7, "frames": 10}


def row(calibration: str, replay: float, nll: float, window: str = "none") -> dict[str, Any]:
    """A row whose still frames cost nothing, and whose turning ones cost twice as much."""
    gate = "none" if calibration == "dense" else calibration.split(",")[0].split(" ")[0]
    groups = {"still": values(replay, 1.0), "turning": values(replay, 2 * nll - 1), "my_way_home": values(replay, nll)}
    names = {"gate": gate, "calibration": calibration, "sparse_attention": window, "groups": groups}
    return values(replay, nll) | names


def results(study: SimpleNamespace) -> dict[str, Any]:
    within = study.stages.within
    rows = [row("dense", 0.0, 1.0), row("random", 0.08, 1.2), row("dense", 0.0, 1.3, "window 65, sinks 16")]
    for variant, cost in ((study.setup.MEAN, 0.5), (study.setup.DELTA, 0.25), (study.setup.LEARNED, 0.125)):
        rows += [row(variant.name, share, 1 + cost * share) for share in (0.2, 0.4, 0.8)]
        rows += [row(within(variant, limit), (limit - 1) / cost, limit) for limit in study.setup.LIMITS]
    layer = {"output change": 0.5, "tas, mean of heads": 0.1, "tas, trained heads": 0.2, "input change": 0.8}
    errors = {"dense": [0.0, 0.01], "true": [0.02, 0.03]}
    rolled = {"replay_ratio": 0.5, "agreement": [1.0, 0.5], "errors": errors, "ssim": errors}
    return {
        "held_out": rows,
        "held_out_scenario": [r for r in rows if r["sparse_attention"] == "none"],
        "precisions": [
            row("dense", 0.0, 1.0) | {"precision": "float32"},
            row("dense", 0.0, 1.1) | {"precision": "w8a8"},
        ],
        "similarity": {"still": [{}], "turning": [layer], "walking": [{}], "shooting": [{}], "all": [layer]},
        "rollouts": {"dense": rolled, "learned": rolled},
        "variants": (study.setup.MEAN, study.setup.DELTA, study.setup.LEARNED),
    }


def test_the_page_computes_its_verdicts(study: SimpleNamespace) -> None:
    found = results(study)
    shares = {"still": 0.1, "turning": 0.9}
    page = study.document.Page(study.setup.Counts(rollout_frames=2), {"trained": found, "tuned": found}, shares)
    text = "\n".join(study.document._lines(page))
    assert "| trained | `tas, mean of heads` | 10 % | 20 % | 10 % | 20 % |" in text
    assert "| tuned | `learned` | 40 % | 80 % | 40 % | 80 % |" in text
    assert "- Goal: 80 % at 1.10x after tuning: reached." in text
    assert "| trained | `input_delta` | 80 % / 80 % | 10 % / 20 % |" in text, "of still and of turning frames"
    gates = "`tas, mean of heads` 10 % (5.0x), `input_delta` 20 % (10.0x), `learned` 40 % (20.0x)"
    assert f"- turning: chance replays 2 % at 1.10x of the dense NLL, {gates}." in text
    assert "| trained | `learned` | 50 % | dense rollout | 60.0 | 20.0 |" in text
    assert "| trained | window 65, sinks 16 | dense | 0 % | 1.300 | 1.300x |" in text
    assert "| trained | w8a8 | dense | 0 % | 1.1000 | 1.100x | 1.100x |" in text
