"""fastcar evaluate: rows, resumption, pictures, and what it refuses."""

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import check_module
from decoders import llama
from typer.testing import CliRunner

import fastcar_compile as fc
from fastcar_compile.cli import app
from fastcar_compile.errors import InputError
from fastcar_compile.tune.evaluate import Case, SinkWindow, Study, entry_point, load_cases, save_cases
from fastcar_compile.tune.evaluate.frames import likeness, ssim_by_frame, to_frames
from fastcar_compile.tune.evaluate.plots import shown

FRAME, LENGTH = 8, 33
TINY: dict[str, Any] = {"decoder": "tiny", "tokens_per_frame": FRAME}


def videos(seed: int, count: int = 3) -> np.ndarray:
    """int64 [count, 1 + 4 frames]; few symbols, so that places repeat."""
    drawn = np.random.default_rng(seed).integers(0, 3, (count, LENGTH - 1))
    return np.concatenate([np.full((count, 1), 16), drawn], 1)


def frames(tokens: np.ndarray) -> np.ndarray:
    """Eight symbols are a 4x8 picture of 2x2 patches, its grey values the symbols."""
    return tokens.reshape(len(tokens), -1, 2, 4).repeat(2, 2).repeat(2, 3) / 16


CASES = [
    Case("dense"),
    Case("fixed", fc.ReplayConfig(gate="always", threshold=[0.0, None])),
    Case("fixed", fc.ReplayConfig(gate="input_delta", threshold=1.0, max_chain=1), 0.5),
    Case("random", fc.ReplayConfig(gate="random", threshold=[0.5, 0.5]), 0.5),
    Case("dense", attention=SinkWindow(6, 2)),
]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    check_module("skimage")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("study")
    return Study(llama(), videos(1), **TINY, detokenize=frames, journal=folder / "j")


@pytest.fixture(scope="module")
def rows(study: Study) -> list[dict[str, Any]]:
    return study.rows(CASES)


def test_rows_say_what_was_measured(rows: list[dict[str, Any]]) -> None:
    dense, always, delta, random, window = rows
    assert json.loads(json.dumps(rows)) == rows
    assert {r["nll_dense"] for r in rows} == {dense["nll"]}
    assert (dense["replay_ratio"], dense["token_agreement"], dense["gate"]) == (0.0, 1.0, "none")
    assert always["replay_by_layer"] == [1.0, 0.0]
    assert always["replay_ratio"] == 0.5
    assert always["replay_ratio_all_forwards"] == pytest.approx(0.5 * 23 / 31)  # 31 forwards, the first 8 computed
    assert (delta["target_replay"], delta["max_chain"]) == (0.5, 1)
    assert 0 < delta["replay_ratio"] <= 0.5
    assert random["replay_ratio"] == pytest.approx(0.5, abs=0.15)
    assert (window["sparse_attention"], window["replay_ratio"]) == ("window 6, sinks 2", 0.0)
    assert window["nll"] != dense["nll"]
    for row in rows[1:4]:
        assert row["nll_by_frame"][0] == dense["nll_by_frame"][0], "the first frame never replays"
        assert row["nll"] == pytest.approx(np.mean(row["nll_by_frame"][1:]))
        assert row["token_agreement"] < 1.0
        assert 0 < row["psnr"] < 40


def test_details_are_those_of_plain_hugging_face(study: Study, rows: list[dict[str, Any]]) -> None:
    tokens = torch.from_numpy(videos(1))
    with torch.inference_mode():
        logits = llama()(tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(study.judge.dense.losses, losses, atol=1e-5, rtol=1e-4)
    assert torch.equal(study.judge.dense.predicted, logits.argmax(-1))
    assert rows[0]["nll"] == pytest.approx(float(losses[:, FRAME:].mean()), rel=1e-5)
    made, true = frames(logits.argmax(-1).numpy())[:, 1:], frames(tokens[:, 1:].numpy())[:, 1:]
    assert rows[0]["psnr"] == pytest.approx(-10 * math.log10(np.mean((made - true) ** 2)))


def test_groups_of_frames_are_measured_apart(study: Study, rows: list[dict[str, Any]]) -> None:
    """Two groups share the frames between them, so their means are those of the whole. Symbol 0 counts nowhere."""
    every = np.ones((3, 4), bool)
    odd = every.copy()
    odd[:, ::2] = False
    options: dict[str, Any] = {"decoder": "tiny", "detokenize": frames}
    groups = {"odd": odd, "even": ~odd, "all": every}
    (row,) = Study(study.program, videos(1), groups=groups, **options).rows(CASES[2:3])
    parts, plain = row.pop("groups"), rows[2]
    assert row == plain
    assert [parts[name]["frames"] for name in groups] == [6, 3, 9], "the first frame counts nowhere"
    for key in ("nll", "nll_dense", "token_agreement", "replay_ratio", "replay_by_layer", "psnr", "ssim"):
        assert parts["all"][key] == pytest.approx(plain[key]), key
    assert np.average([parts[n]["nll"] for n in ("odd", "even")], weights=[6, 3]) == pytest.approx(plain["nll"])
    assert min(parts["odd"]["ssim"], parts["even"]["ssim"]) < plain["ssim"]

    counting = Study(study.program, videos(1), groups=groups, counted=(1, 16), **options)
    (fewer,) = counting.rows(CASES[2:3])
    losses, counted = counting.judge._details(CASES[2]).losses[:, FRAME:], videos(1)[:, 1 + FRAME :] > 0
    assert fewer["nll"] == pytest.approx(float(losses.numpy()[counted].mean()))
    assert fewer["groups"]["all"]["nll"] == pytest.approx(fewer["nll"])
    assert fewer["replay_ratio"] == row["replay_ratio"], "forwards of given tokens replay like any"


def test_a_group_that_does_not_fit_the_videos_is_refused(study: Study) -> None:
    with pytest.raises(InputError, match=r"group 'a' is bool \[3, 5\], expected bool \[3, 4\]"):
        Study(study.program, videos(1), groups={"a": np.ones((3, 5), bool)}, decoder="tiny").rows(CASES[:1])
    first = np.arange(4) < np.ones((3, 1))
    with pytest.raises(InputError, match="group 'a' has no frame after the first one"):
        Study(study.program, videos(1), groups={"a": first}, decoder="tiny").rows(CASES[:1])


def test_places_follow_the_decisions(study: Study) -> None:
    places = study.judge.measure(CASES[1]).places
    assert places.shape == (2, 4, FRAME)
    assert np.isnan(places[:, 3, FRAME - 1]).all(), "the last token is predicted, never read"
    assert places[0, 0].max() == 0.0
    assert np.nanmin(places[0, 1:]) == 1.0
    assert np.nanmax(places[1]) == 0.0


def test_a_window_is_masked_attention() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    found = SinkWindow(4, 3)(query, keys, values, torch.tensor([9]), 0.3)
    for i in range(5):
        p = 9 + i
        seen = [j for j in range(p + 1) if j < 3 or j > p - 4]
        for head in range(4):
            key, value = keys[:, head // 2, seen], values[:, head // 2, seen]
            weights = (0.3 * (key @ query[:, head, i, :, None])[..., 0]).softmax(-1)
            expected = (weights[..., None] * value).sum(1)
            torch.testing.assert_close(found[:, head, i], expected)


def test_rows_are_kept(study: Study, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"decoder": "tiny", "journal": study._journal._path}
    again = Study(llama(), videos(1), tokens_per_frame=FRAME, **options, progress=lines.append)
    assert (again.rows(CASES), lines) == (rows, [])
    other = Study(study.program, videos(2), **options, progress=lines.append)
    assert other.rows(CASES[:1]) != rows[:1]
    assert lines == ["1 of 1: dense", "dense"]


def test_plan_reaches_its_ratios(study: Study, tmp_path: Path) -> None:
    gates = [fc.ReplayConfig(gate="input_delta"), fc.ReplayConfig(gate="tas", heads=[1])]
    cases = study.plan(videos(3), gates, [0.5], journals=tmp_path)
    names = ["dense", *(f"{g}-{c}-0.5" for g in ("input_delta", "tas") for c in ("calibrated", "uniform"))]
    assert [c.name for c in cases] == [*names, "random-random-0.5"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input_delta.json", "tas.json"]
    calibration = Study(study.program, videos(3), decoder="tiny")
    found = {c.name: calibration.judge.measure(c).row for c in cases}
    for gate in ("input_delta", "tas"):
        good, plain = found[f"{gate}-calibrated-0.5"], found[f"{gate}-uniform-0.5"]
        assert good["replay_ratio"] >= 0.5
        # Decisions depend on earlier ones: one step of the threshold moves several of the 138.
        assert plain["replay_ratio"] == pytest.approx(0.5, abs=0.04)
        assert good["nll"] <= plain["nll"], "one quantile for all is among the candidates"
    assert [c.gate for c in shown(cases)] == ["input_delta", "tas"]
    save_cases(cases, tmp_path / "cases.json")
    assert load_cases(tmp_path / "cases.json") == cases
    with pytest.raises(fc.InputError, match="a calibration video is a held-out video too"):
        study.plan(videos(1)[1:], gates, [0.5])
    with pytest.raises(fc.InputError, match="unknown calibration 'best'"):
        study.plan(videos(3), gates, [0.5], ["best"])
    with pytest.raises(fc.InputError, match=r"a replay ratio of 1\.5"):
        study.plan(videos(3), gates, [1.5])


def test_frames() -> None:
    tokens = np.zeros((2, 16), np.int64)
    grey = to_frames(lambda t: np.full((2, 2, 2, 4), 255, np.uint8), tokens, 2)
    assert (grey.shape, grey.max()) == ((2, 2, 2, 4, 1), 1.0)
    with pytest.raises(fc.InputError, match=r"gave float64 \[2, 16\] for 2 videos of 2 frames"):
        to_frames(lambda t: t / 2.0, tokens, 2)
    with pytest.raises(fc.InputError, match="values from 0 to 3"):
        to_frames(lambda t: np.resize([0.0, 3.0], (2, 2, 2, 4)), tokens, 2)


def test_ssim_is_one_only_for_equal_frames() -> None:
    check_module("skimage")
    noise = np.random.default_rng(0).random((1, 2, 8, 8, 1))
    assert likeness(noise, noise).figures() == {"psnr": math.inf, "ssim": pytest.approx(1.0)}
    assert likeness(noise, noise[:, ::-1]).ssim < 0.5
    half, white = np.full_like(noise, 0.5), np.ones_like(noise)
    assert likeness(white, half).psnr == pytest.approx(-10 * math.log10(0.25))
    with pytest.raises(fc.InputError, match="frames of 2x8 pixels are too small for SSIM"):
        ssim_by_frame(noise[:, :, :2], noise[:, :, :2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frames", "names no function"),
        ("no_such_module_here:frames", "no_such_module_here cannot be imported"),
        ("missing.py:frames", "no such file: missing.py"),
        ("math:frames", "math has no function 'frames'"),
    ],
)
def test_entry_points_that_are_none(text: str, message: str) -> None:
    with pytest.raises(fc.UserError, match=message):
        entry_point(text)


@pytest.fixture(scope="module")
def fastcar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[..., tuple[int, str]]]:
    """A folder with a decoder and videos, and the command."""
    folder = tmp_path_factory.mktemp("cli")
    model = llama()
    model.config.tokens_per_frame = FRAME
    model.save_pretrained(folder / "model")
    np.save(folder / "held.npy", videos(1))
    np.savez(folder / "calibration.npz", tokens=videos(3))
    (folder / "detokenizer.py").write_text(f"import numpy as np\n{inspect.getsource(frames)}")

    def run(*words: object) -> tuple[int, str]:
        outcome = CliRunner().invoke(app, ["evaluate", str(folder / "model"), *(str(w) for w in words)])
        return outcome.exit_code, outcome.stdout if outcome.exit_code == 0 else outcome.output

    return folder, run


def test_command_line(fastcar: tuple[Path, Callable[..., tuple[int, str]]], rows: list[dict[str, Any]]) -> None:
    check_module("matplotlib")
    folder, run = fastcar
    common = ["--videos", folder / "held.npy", "--detokenize", f"{folder / 'detokenizer.py'}:frames"]
    plan = ["--calibration-videos", folder / "calibration.npz", "--gates", "input_delta", "--ratios", 0.5]
    files = ["--output", folder / "rows.json", "--plots", folder / "plots", "--save-cases", folder / "cases.json"]
    code, text = run(*common, *plan, "--calibrations", "uniform", "--sparse-attention", "none,6/2", *files)
    assert code == 0, text
    assert "input_delta" in text
    found = json.loads((folder / "rows.json").read_text())
    expected = [(g, a) for a in ("none", "window 6, sinks 2") for g in ("none", "input_delta")]
    assert [(r["gate"], r["sparse_attention"]) for r in found] == expected
    assert found[0]["nll"] == rows[0]["nll"]
    assert found[2]["nll"] == rows[4]["nll"]
    names = ["drift.png", "heat-input_delta-uniform-0.5.png"]
    assert sorted(p.name for p in (folder / "plots").iterdir()) == [*names, "quality.png", "strips.png"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in (folder / "plots").iterdir())
    code, text = run(*common, "--cases", folder / "cases.json", "--json")
    assert code == 0, text
    assert json.loads(text) == {"rows": found[:2]}


def test_command_line_refuses(fastcar: tuple[Path, Callable[..., tuple[int, str]]]) -> None:
    folder, run = fastcar
    common = ["--videos", folder / "held.npy"]
    np.save(folder / "floats.npy", np.zeros((2, 9)))
    np.savez(folder / "two.npz", a=videos(1), b=videos(2))
    cases: list[tuple[list[Any], str]] = [
        (common, "exactly one of --calibration-videos and --cases is needed"),
        ([*common, "--cases", folder / "held.npy"], "the cases cannot be read"),
        ([*common, "--cases", "x", "--sparse-attention", "16"], "'16' is not an attention"),
        (["--videos", folder / "no.npy", "--cases", "x"], "the video file does not exist"),
        (["--videos", folder / "floats.npy", "--cases", "x"], "float64 [2, 9], expected integers [N, T]"),
        (["--videos", folder / "two.npz", "--cases", "x"], "the video file has no array 'tokens', only a, b"),
        (
            [*common, "--calibration-videos", folder / "held.npy", "--ratios", "0.5,most"],
            "'0.5,most' is not a list of replay ratios",
        ),
        ([*common, "--cases", "x", "--ratios", "0.5"], "--ratios has no effect with --cases"),
        ([*common, "--cases", "x", "--counted", "5:5"], "'5:5' is not a range of token ids"),
        ([*common, "--cases", "x", "--sparse-attention", "0/4"], "a window of 0 tokens with 4 sinks"),
    ]
    for words, message in cases:
        code, text = run(*words)
        assert (code, message in text) == (2, True), text
