"""What a terminal is given has no control characters from files; outputs are checked before the work."""

import json
import re
import unicodedata
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from fastcar_compile.cli import app
from fastcar_compile.cli.commands import COMMANDS, REGISTRY
from fastcar_compile.cli.common import Writes
from fastcar_compile.cli.output import print_fields, print_table, print_text, visible

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp.exe\u2066\r\x00b"


def harmless(text: str) -> bool:
    return all(unicodedata.category(sign) not in ("Cc", "Cf", "Cs") or sign in "\n\t" for sign in text)


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_invisible_is_left(text: str) -> None:
    seen = visible(text)
    soft = "\xad\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\u180e"
    assert harmless(re.sub(f"[{soft}\U00010000-\U0010ffff]", "", seen))
    assert "\n" not in visible(text, lines=False)


def test_plain_text_stays() -> None:
    assert visible("é 漢 ✓ a\tb\nc") == "é 漢 ✓ a\tb\nc"


def test_every_way_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(HOSTILE)
    print_fields({HOSTILE: HOSTILE})
    print_table(["name"], [[HOSTILE]])
    said = capsys.readouterr().out
    assert harmless(said)
    assert said.count("\\x1b[2J") == 4


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("words", [("inspect",), ("diff", "x"), ("opt",), ("compile",), ("estimate",), ("verify",)])
def test_a_path_in_an_error(words: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*words, tmp_path / "a\x1b[2J\nerror: nothing is wrong\u202e")
    assert result.exit_code == 2, result.output
    assert harmless(result.output)
    as_json = run(*words, tmp_path / "a\x1b[2J\u202e", "--json")
    assert as_json.exit_code == 2
    assert harmless(as_json.stdout)
    assert json.loads(as_json.stdout)["error"]["exit_code"] == 2


def test_a_usage_error(tmp_path: Path) -> None:
    result = run("inspect", "x", f"--{HOSTILE}")
    assert result.exit_code == 2
    assert harmless(result.output)
    assert json.loads(run("inspect", "--nothing", "--json").stdout)["error"]["hint"] == "see `fastcar inspect --help`"
    assert json.loads(run("nothing", "--json").stdout)["error"]["exit_code"] == 2


OUTPUTS: dict[str, dict[str, list[str]]] = {
    "calibrate": {"output": [], "journal": ["-o", "{out}"]},
    "compile": {},
    "estimate": {"time_line": ["--shape", "x"]},
    "evaluate": {
        option: ["--calibration-videos", "{videos}"] for option in ("output", "save_cases", "plots", "journal")
    },
    "fit-draft": {"output": [], "checkpoint": ["-o", "{out}"]},
    "inspect": {"html": []},
    "opt": {"output": []},
    "run": {"output": ["--prompt", "1"], "trace": ["--prompt", "1"]},
    "train-gate": {"output": ["--target-replay", "0.5"], "checkpoint": ["--target-replay", "0.5", "-o", "{out}"]},
    "tune-decoder": {"output": ["--target-replay", "0.5"], "checkpoint": ["--target-replay", "0.5", "-o", "{out}"]},
}
"""Command -> option that writes -> the other words that it needs."""

READ = {"artifact", "videos", "calibration_videos", "gate_weights", "draft", "cases", "model", "decoder", "start"}
READ |= {"path", "a", "b", "matrix", "folder", "prompt_file", "thresholds", "context", "context_mask", "trace"}
READ |= {"public_key", "key", "passphrase_file", "signature"}
"""Paths that commands read. `run` writes its `trace`."""


def paths_of(command: str) -> dict[str, bool]:
    """The parameters of a command that are paths, and whether they are marked as written."""
    hints = get_type_hints(REGISTRY.load(command).__wrapped__, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    kinds = get_type_hints(REGISTRY.load(command).__wrapped__)
    paths = [name for name, kind in kinds.items() if Path in (kind, *get_args(kind))]
    return {name: any(isinstance(note, Writes) for note in notes[name]) for name in paths}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_is_read_or_marked_as_written(command: str) -> None:
    """The folder of `compile` is checked elsewhere, by its writer."""
    paths = paths_of(command)
    written = {name for name, marked in paths.items() if marked}
    assert written == {*OUTPUTS.get(command, ()), *(["output"] if command == "compile" else [])}
    assert paths.keys() - written <= READ


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, options in OUTPUTS.items() for o in options])
def test_an_output_is_checked_before_the_work(command: str, option: str, tmp_path: Path) -> None:
    videos = tmp_path / "videos.npy"
    np.save(videos, np.ones((2, 9), np.int64))
    (tmp_path / "model").mkdir()
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / "below.npy"
    words = [word.format(videos=videos, out=tmp_path / "out.npy") for word in OUTPUTS[command][option]]
    first = [] if command == "estimate" else [tmp_path / "model"]
    second = ["--videos", videos] if "videos" in paths_of(command) else []
    result = run(command, *first, *second, f"--{option.replace('_', '-')}", bad, *words, "--json")
    assert result.exit_code == 2, result.output
    error = json.loads(result.stdout)["error"]
    assert "cannot be written: Not a directory" in error["message"], error
    assert error["where"] == str(bad)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model", "videos.npy"]
