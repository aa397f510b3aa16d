"""calibrate: meets its goal, is deterministic, goes on from a journal; thresholds as files and inside an artifact."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import llama, rewritten
from typer.testing import CliRunner

import fastcar_compile as fc
from fastcar_compile.artifact.thresholds import ExpectedLayers
from fastcar_compile.cli import app
from fastcar_compile.errors import InputError
from fastcar_compile.phases import _warn_of_defaults
from fastcar_compile.tune import calibrate, search
from fastcar_compile.tune.journal import Journal

FRAME, LENGTH = 8, 33
SIZES: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH, "prefill_chunk": 8}
REPLAY = fc.ReplayConfig(gate="input_delta")


def videos() -> np.ndarray:
    """Two frames in turn, so that the random decoder's scores differ between places."""
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 17, (4, 2, FRAME))
    return np.concatenate([np.full((4, 1), 16), frames[:, [0, 0, 1, 0]].reshape(4, -1)], 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse search: what is tested does not depend on how fine it is."""
    monkeypatch.setattr(search, "QUANTILES", (0.4, 0.9))
    monkeypatch.setattr(search, "STEPS", (0.25,))
    monkeypatch.setattr(search, "SPREADS", (0.2,))
    torch.set_num_threads(1)


def test_target_replay_is_met_deterministically_and_resumes(artifact: fc.Artifact, tmp_path: Path) -> None:
    def calibrated(**options: Any) -> fc.Thresholds:
        return fc.calibrate(artifact, videos(), **options)

    lines: list[str] = []
    journal = tmp_path / "journal.json"
    first = calibrated(target_replay=0.5, journal=journal, progress=lines.append)
    assert first.replay >= 0.5
    assert first.gate == "input_delta"
    assert first.nll_dense > 0
    assert lines[-1].startswith(f"all videos: {len(lines)} measured, last: replay ")
    again: list[str] = []
    assert calibrated(target_replay=0.5, progress=again.append) == first
    assert again == lines
    assert calibrated(target_replay=0.5, journal=journal, progress=again.append) == first
    assert again == lines, "nothing is measured twice"
    data = json.loads(journal.read_text())
    data["key"] = "of other videos"
    journal.write_text(json.dumps(data))
    calibrated(target_replay=0.5, journal=journal, progress=again.append)
    assert len(again) == 2 * len(lines)


@pytest.mark.thorough  # rows and calibration are each tested by themselves
def test_rows_of_their_own_positions_change_nothing(artifact: fc.Artifact, tmp_path: Path) -> None:
    """The prefill graph of such an artifact reads one video."""
    options: dict[str, Any] = {**SIZES, "batch_size": 2, "rows": 1}
    own = fc.compile(
        llama(), "cpu", replay=REPLAY.model_copy(update={"threshold": 0.1}), output=tmp_path / "a", **options
    )
    found, expected = (fc.calibrate(a, videos(), target_replay=0.5) for a in (own, artifact))
    assert {**found.to_json(), "inputs": ""} == {**expected.to_json(), "inputs": ""}


@pytest.mark.parametrize("increase", [0.0, 0.002])
def test_max_nll_increase_is_kept(artifact: fc.Artifact, increase: float) -> None:
    found = fc.calibrate(artifact, videos(), max_nll_increase=increase)
    assert found.nll <= (1 + increase) * found.nll_dense * (1 + 1e-9)
    assert found.replay > 0 or increase == 0


def test_some_videos_choose_and_all_meet_the_target(
    artifact: fc.Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"target_replay": 0.5, "progress": lines.append}
    found = fc.calibrate(artifact, videos(), journal=tmp_path / "journal.json", search_videos=2, **options)
    assert found.replay >= 0.5
    assert found.expected is not None
    assert (found.expected.videos, found.expected.searched) == (len(videos()), 2)
    assert sum(line.startswith("2 of 4 videos: ") for line in lines) > len(lines) / 2
    assert sum(line.startswith("all videos: ") for line in lines) <= search.TRIES
    monkeypatch.setattr(calibrate, "SEARCH_TOKENS", 2 * LENGTH)
    assert fc.calibrate(artifact, videos(), **options) == found, "as many as the tokens give"
    assert found.expected.low <= found.expected.replay <= found.expected.high
    names = json.loads((tmp_path / "journal.json").read_text())["measurements"]
    few = [name for name in names if name.startswith("2 videos ")]
    assert len(few) > len(names) / 2, "most is measured on two of the four videos"
    found.save(tmp_path / "t.json")
    assert fc.Thresholds.load(tmp_path / "t.json") == found


def test_a_closed_layer_of_a_model_stays_closed(tmp_path: Path) -> None:
    replay = fc.ReplayConfig(gate="input_delta", threshold=[None, 0.5])
    options: dict[str, Any] = {"replay": replay, "tokens_per_frame": FRAME, "journal": tmp_path / "journal.json"}
    found = fc.calibrate(llama(), videos(), target_replay=0.4, **options)
    assert found.values[0] is None
    assert found.per_layer[0] == 0.0
    assert found.per_layer[1] >= 0.8
    with pytest.raises(fc.InputError, match=r"a replay ratio of 0.9 cannot be reached: the most is 0\.\d+"):
        fc.calibrate(llama(), videos(), target_replay=0.9, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "exactly one of target_replay and max_nll_increase is needed"),
        ({"target_replay": 0.5, "max_nll_increase": 0.1}, "exactly one of"),
        ({"target_replay": 1.5}, "target_replay is 1.5"),
        ({"max_nll_increase": -1.0}, "max_nll_increase is -1.0"),
    ],
)
def test_bad_goals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(fc.InputError, match=text):
        fc.calibrate(llama(), videos(), **options)


def test_a_decoder_without_a_prefill_program_is_refused() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "prefill_chunk"}
    program = rewritten(llama(), chunk=1, replay=REPLAY, **sizes)
    with pytest.raises(fc.InputError, match="compile with a prefill_chunk of 2 to 8"):
        calibrate.search_of(program, REPLAY, videos())


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    path = tmp_path_factory.mktemp("calibrate") / "artifact"
    text = r"no thresholds were given: .* default threshold of gate input_delta, 0\.1, .*fastcar calibrate.*--no-replay"
    with pytest.warns(UserWarning, match=text):
        return fc.compile(llama(), "cpu", replay=REPLAY, output=path, **SIZES)


@pytest.mark.parametrize(
    "replay",
    [
        None,
        fc.ReplayConfig(threshold=1.0),
        fc.ReplayConfig(threshold=[2.0, None]),
        fc.ReplayConfig(threshold=None),
        fc.ReplayConfig(threshold=2.0),
        fc.ReplayConfig(gate="input_delta", threshold=0.1),
        fc.ReplayConfig().model_copy(update={"threshold": 2.0}),
        fc.ReplayConfig.from_json(fc.ReplayConfig().to_json()),
    ],
)
def test_thresholds_that_were_given_are_not_warned_of(replay: fc.ReplayConfig | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_defaults(replay)


@pytest.mark.parametrize("gate", ["tas", "input_delta"])
def test_thresholds_that_were_not_given_are_warned_of(gate: str) -> None:
    left_out = fc.ReplayConfig(gate=gate)
    options: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH}
    for replay in (left_out, fc.CompileConfig(target="cpu", replay=left_out, **options).replay):
        with pytest.warns(UserWarning, match=f"no thresholds were given: .* of gate {gate}, "):
            _warn_of_defaults(replay)
    assert left_out == fc.ReplayConfig(gate=gate, threshold=left_out.threshold)


def result(values: tuple[float | None, ...], gate: str = "input_delta") -> fc.Thresholds:
    return fc.Thresholds(
        gate=gate, values=values, replay=0.5, per_layer=(0.5,) * len(values), nll=1.0, nll_dense=0.9, goal="x",
        inputs="y",
    )  # fmt: skip


def test_stored_thresholds_are_found_and_can_be_swapped(artifact: fc.Artifact, tmp_path: Path) -> None:
    before = {name: entry.sha256 for name, entry in artifact.manifest.files.items()}
    share = ExpectedLayers(replay=0.5, low=0.4, high=0.6, confidence=0.9, videos=4, videos_needed=9)
    artifact.store_thresholds(result((0.25, None)).model_copy(update={"expected": share}))
    opened = fc.load(artifact.path)
    assert opened.thresholds == result((0.25, None))
    assert opened.session("eager").thresholds.tolist() == [0.25, -float("inf")]
    result((float("inf"), 0.75)).save(tmp_path / "other.json")
    assert opened.session("eager", thresholds=tmp_path / "other.json").thresholds.tolist() == [float("inf"), 0.75]
    assert fc.Thresholds.load(tmp_path / "other.json") == result((float("inf"), 0.75))
    opened.store_thresholds(None)
    again = fc.load(artifact.path)
    assert again.session("eager").thresholds.tolist() == pytest.approx([0.1, 0.1])
    assert {name: entry.sha256 for name, entry in again.manifest.files.items()} == before
    assert sorted(p.name for p in artifact.path.parent.iterdir()) == ["artifact"]


def test_an_open_session_takes_calibrated_thresholds(artifact: fc.Artifact) -> None:
    session = artifact.session("eager")
    session.set_threshold(result((0.25, None)))
    assert session.thresholds.tolist() == [0.25, -float("inf")]
    with pytest.raises(fc.ArtifactError, match="gate tas for 2 layers do not fit an artifact of 2 layers"):
        session.set_threshold(result((1.0, 2.0), "tas"))
    assert session.thresholds.tolist() == [0.25, -float("inf")]


def test_thresholds_of_something_else_are_refused(artifact: fc.Artifact) -> None:
    gate, layers = result((1.0, 2.0), "tas"), result((1.0, 2.0, 3.0))
    for call, text in (
        (lambda: artifact.store_thresholds(gate), "gate tas for 2 layers do not fit .* with gate input_delta"),
        (lambda: artifact.session("eager", thresholds=layers), "for 3 layers do not fit an artifact of 2 layers"),
    ):
        with pytest.raises(fc.ArtifactError, match=text):
            call()


def test_command_line(artifact: fc.Artifact, tmp_path: Path) -> None:
    def fastcar(*words: object) -> tuple[int, str]:
        outcome = CliRunner().invoke(app, [str(w) for w in words])
        return outcome.exit_code, outcome.output

    np.save(tmp_path / "videos.npy", videos())
    command = ["calibrate", artifact.path, "--videos", tmp_path / "videos.npy"]
    code, text = fastcar(*command, "--target-replay", 0.4)
    assert (code, "the thresholds would go nowhere" in text) == (2, True)
    code, text = fastcar(*command, "-o", tmp_path / "t.json")
    assert (code, "exactly one of --target-replay and --max-nll-increase" in text) == (2, True)
    code, text = fastcar(*command, "--target-replay", 0.4, "--search-videos", 3, "-o", tmp_path / "t.json")
    assert code == 0, text
    assert re.search(r"^measured on +4 videos, of which 3 found the layers' shares$", text, re.MULTILINE)
    assert re.search(r"^gate +input_delta$", text, re.MULTILINE)
    words = " ".join(text.split())
    assert re.search(r"on other videos [\d.]+% expected, [\d.]+% to [\d.]+% with 90% probability over many", words)
    found = fc.Thresholds.load(tmp_path / "t.json")
    assert found.replay >= 0.4
    run = ["run", artifact.path, "--prompt", "16", "--num-tokens", 12, "--backend", "eager", "--json"]
    code, text = fastcar(*run, "--thresholds", tmp_path / "t.json")
    assert code == 0, text
    code, text = fastcar(*run, "--thresholds", tmp_path / "t.json", "--threshold", "1")
    assert (code, "--threshold and --thresholds cannot be given together" in text) == (2, True)


def test_calibrated_artifact_decodes_as_it_was_measured(artifact: fc.Artifact) -> None:
    found = fc.calibrate(artifact, videos(), target_replay=0.5)
    session = artifact.session("eager", record=True, thresholds=found)
    decisions = []
    for row in torch.from_numpy(videos()):
        session.reset()
        session.prefill(row[None, :1])
        for token in row[1:-1]:
            session.step(token[None])
        decisions.append(session.stats.decisions[FRAME:])
    np.testing.assert_allclose(np.concatenate(decisions).mean((0, 2)), found.per_layer)


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    """A file of other inputs is begun anew."""
    path = tmp_path / "journal.json"
    Journal(path, "key").add("first", [1.5, 0.25, 0.5, 1])
    assert Journal(path, "key").entries == {"first": [1.5, 0.25, 0.5, 1]}
    assert not Journal(path, "of other videos").entries
    path.write_text(path.read_text()[:-9])
    with pytest.raises(InputError, match=r"the journal cannot be read: EOF while parsing .* at line \d+"):
        Journal(path, "key")
