"""Outputs of one command that collide with each other or with an input are refused before the work."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastcar_compile.cli.commands import app


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an artifact `a`, a model `m`, inputs, and links to them. None of them is ever read."""
    (tmp_path / "a" / "hls").mkdir(parents=True)
    (tmp_path / "a" / "manifest.json").write_text("{}")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    for name in ("in.npy", "g.json", "t.toml", "d.py"):
        (tmp_path / name).write_bytes(b"kept")
    (tmp_path / "there").symlink_to("a")
    (tmp_path / "link.npy").symlink_to("new.npy")
    (tmp_path / "hard.npy").hardlink_to(tmp_path / "in.npy")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COLLISIONS = [
    ("run a --prompt 1 -o new.npy --trace link.npy", "--output would overwrite trace"),
    ("run a --prompt 1 -o in.npy --trace hard.npy", "--output would overwrite trace"),
    ("run there --prompt 1 --trace a/hls/x.npy", "--trace would overwrite artifact"),
    ("calibrate a --videos in.npy --target-replay 0.5 -o j --journal ./j", "--output would overwrite journal"),
    ("evaluate m --videos in.npy --cases g.json --save-cases g.json", "--save-cases would overwrite cases"),
    ("evaluate m --videos in.npy --detokenize d.py:f -o d.py", "--output would overwrite detokenize"),
    ("train-gate m --videos in.npy --target-replay 0.5 -o m/config.json", "--output would overwrite decoder"),
    ("opt g.json -p canonicalize -o g.json", "--output would overwrite path"),
    ("estimate --shape llama2-7b --target t.toml --time-line t.toml", "--time-line would overwrite target"),
    ("compile m -o there/../m", "--output would overwrite model"),
]


@pytest.mark.parametrize(("words", "text"), COLLISIONS)
def test_a_collision_is_refused_before_the_work(place: Path, words: str, text: str) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert text in result.output
    assert "hint:  give a place of its own" in result.output
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "words",
    [
        "run a --prompt 1 -o x.npy --trace y.npy",
        "run a --prompt 1 -o /dev/null --trace /dev/null",
        "evaluate m --videos in.npy --plots p -o p/rows.json",
        "compile m -o m/built",
        "train-gate m --videos in.npy --target-replay 0.5 -o m/gate.safetensors",
    ],
)
def test_what_may_stand_beside_each_other(place: Path, words: str) -> None:
    (place / "p").mkdir()
    result = CliRunner().invoke(app, words.split())  # none of the inputs can be read
    assert result.exit_code == 2
    assert "overwrite" not in result.output
