"""Outputs of one command that collide with each other or with an input are refused before the work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastcar_compile.cli.commands import COMMANDS, app
from fastcar_compile.cli.places import path_options
from fastcar_compile.errors import UserError
from fastcar_compile.outputs import Place, check_apart

WRITTEN: dict[str, set[str]] = {
    "compile": {"--output"},
    "train-gate": {"--output", "--checkpoint"},
    "tune-decoder": {"--output", "--checkpoint"},
    "calibrate": {"--output", "--journal"},
    "evaluate": {"--output", "--save-cases", "--plots", "--journal"},
    "inspect": {"--html"},
    "opt": {"--output"},
    "run": {"--output", "--trace"},
    "estimate": {"--plot"},
    "simulate": {"--time-line", "--report"},
}
READ = {
    *("ARTIFACT", "MODEL", "DECODER", "PATH", "A", "B"),
    *("--target", "--gate-weights", "--videos", "--calibration-videos", "--cases", "--detokenize", "--start"),
    *("--prompt-file", "--thresholds", "--context", "--context-mask", "--trace", "--public-key", "--policy", "--key"),
    *("--certificate", "--chain", "--identity-token-file", "--trust-config", "--passphrase-file", "--root", "--world"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_path_is_known_to_be_read_or_written(name: str) -> None:
    function: Any = COMMANDS[name]
    found = path_options(function.__wrapped__).values()
    assert {option.name for option in found if option.writes} == WRITTEN.get(name, set())
    assert {option.name for option in found if not option.writes} <= READ


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an artifact `a`, a model `m`, inputs, and links to them. None of them is ever read."""
    (tmp_path / "a" / "hls").mkdir(parents=True)
    (tmp_path / "a" / "manifest.json").write_text("{}")
    (tmp_path / "a" / "weights.npy").write_bytes(b"w")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    for name in ("in.npy", "in.safetensors", "g.json", "t.toml", "d.py"):
        (tmp_path / name).write_bytes(b"kept")
    (tmp_path / "there").symlink_to("a")
    (tmp_path / "link.npy").symlink_to("new.npy")
    (tmp_path / "hard.npy").hardlink_to(tmp_path / "in.npy")
    (tmp_path / "into.npy").hardlink_to(tmp_path / "a" / "weights.npy")
    (tmp_path / "a" / "gate.safetensors").write_bytes(b"g")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COLLISIONS = [
    ("run a --prompt 1 -o x.npy --trace x.npy", "--output and --trace are the same"),
    ("run a --prompt 1 -o x.npy --trace m/../x.npy", "--output and --trace are the same"),
    ("run a --prompt 1 -o new.npy --trace link.npy", "--output and --trace are the same"),
    ("run a --prompt 1 -o in.npy --trace hard.npy", "--output and --trace are the same"),
    ("run a --prompt-file in.npy -o in.npy", "--output would overwrite --prompt-file"),
    ("run a --prompt-file in.npy -o hard.npy", "--output would overwrite --prompt-file"),
    ("run a --prompt 1 -o a/x.npy", "--output stands in the artifact ARTIFACT, which has no other files"),
    ("run a --prompt 1 --trace there/hls/x.npy", "--trace stands in the artifact ARTIFACT"),
    ("run there --prompt 1 --trace a/x.npy", "--trace stands in the artifact ARTIFACT"),
    ("run a --prompt 1 -o into.npy", "--output is a hard link to a file in ARTIFACT"),
    ("inspect a --html a/page.html", "--html stands in the artifact ARTIFACT"),
    ("inspect a --html in.npy --trace in.npy", "--html would overwrite --trace"),
    ("calibrate a --videos in.npy --target-replay 0.5 -o in.npy", "--output would overwrite --videos"),
    ("calibrate a --videos in.npy --target-replay 0.5 -o j --journal ./j", "--output and --journal are the same"),
    ("evaluate m --videos in.npy --plots p --journal p", "--journal and --plots are the same"),
    ("evaluate m --videos in.npy --cases g.json --save-cases g.json", "--save-cases would overwrite --cases"),
    ("evaluate m --videos in.npy --detokenize d.py:f -o d.py", "--output would overwrite --detokenize"),
    ("evaluate m --videos in.npy -o m/rows.json", "--output would be read as a part of DECODER"),
    ("train-gate m --videos in.npy --target-replay 0.5 -o m/x.safetensors", "would be read as a part of DECODER"),
    ("train-gate m --videos in.npy --target-replay 0.5 -o g --checkpoint g", "--output and --checkpoint are the same"),
    ("train-gate m --videos in.npy --target-replay 0.5 -o n --start n", "--output would overwrite --start"),
    ("tune-decoder m --videos in.npy --target-replay 0.5 -o m", "--output would overwrite DECODER"),
    ("opt g.json -p canonicalize -o g.json", "--output would overwrite PATH"),
    ("estimate a --plot a/hls/p.png", "--plot stands in the artifact ARTIFACT"),
    ("estimate --shape llama2-7b --target t.toml --plot t.toml", "--plot would overwrite --target"),
    ("simulate a --report a/hls", "--report stands in the artifact ARTIFACT"),
    ("simulate a --time-line in.npy --trace in.npy", "--time-line would overwrite --trace"),
    ("compile m -o m", "--output would overwrite MODEL"),
    ("compile m -o there/../m", "--output would overwrite MODEL"),
    ("compile m -o a --gate learned --gate-weights a/gate.safetensors", "--gate-weights stands in the folder that"),
    ("compile m -o a --target a/t.toml", "--target stands in the folder that --output replaces"),
]


@pytest.mark.parametrize(("words", "text"), COLLISIONS)
def test_a_collision_is_refused_before_the_work(place: Path, words: str, text: str) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert text in result.output
    assert "hint:  give a place of its own" in result.output
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_the_standard_output_is_an_output(place: Path) -> None:
    program = [sys.executable, "-m", "fastcar_compile", "inspect", "a"]
    with (place / "a" / "listing.txt").open("w") as listing:
        done = subprocess.run([*program], stdout=listing, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert done.returncode == 2
    assert "the standard output stands in the artifact ARTIFACT" in done.stderr


def test_what_may_stand_beside_each_other(place: Path) -> None:
    artifact, model = Place("A", place / "a"), Place("M", place / "m")
    check_apart([Place("x", place / "x.npy"), Place("y", place / "y.npy")], [artifact, model])
    check_apart([Place("x", Path("/dev/null")), Place("y", Path("/dev/null"))], [])
    check_apart([Place("out", place / "m" / "built", replaced=True)], [model])
    check_apart([Place("gate", place / "m" / "gates" / "tas.safetensors")], [model])
    check_apart([Place("x", place / "no" / "x"), Place("y", place / "nor" / "x")], [])
    with pytest.raises(UserError, match="x stands in the folder that out replaces"):
        check_apart([Place("out", place / "a", replaced=True), Place("x", place / "a" / "n" / "x")], [])
