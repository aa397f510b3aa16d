"""What the program does whatever the command: help, version, completion, exit codes, pipes, terminals and Ctrl-C."""

import importlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import first_often
from typer.testing import CliRunner

import fastcar_compile as fc
from fastcar_compile.cli import app
from fastcar_compile.cli.commands import ABSENT, COMMANDS
from fastcar_compile.cli.common import ExitCode

from .conftest import Fastcar

PROGRAM = [sys.executable, "-m", "fastcar_compile"]


def test_version(fastcar: Fastcar) -> None:
    result = fastcar("--version")
    assert (result.exit_code, result.stdout) == (0, f"fastcar {fc.__version__}\n")


def test_help_lists_commands_and_exit_codes(fastcar: Fastcar) -> None:
    text = fastcar("--help").stdout
    assert fastcar("-h").stdout == text
    for name in COMMANDS:
        assert f"\n  {name} " in text
    for code in ExitCode:
        assert f"  {code.value:3}  {code.meaning}\n" in text
    assert "..." not in text.split("Commands:")[1], "a summary is cut off"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(fastcar: Fastcar, name: str) -> None:
    result = fastcar(name, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: fastcar {name} ")
    assert "  --json " in result.stdout
    assert "Print one JSON value on stdout" in result.stdout


@pytest.mark.parametrize("name", ABSENT)
def test_an_absent_command_says_what_to_do(fastcar: Fastcar, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcar_compile.cli.commands.entry_points", lambda group: ())
    why, hint = ABSENT[name]
    for words in ((), ("a", "--replay", "0.5"), ("--help",)):
        result = fastcar(name, *words)
        assert result.exit_code == ExitCode.USER_ERROR
        assert f"the command `fastcar {name}` {why}\n  hint:  {hint}\n" in result.stderr
    assert json.loads(fastcar(name, "--json").stdout)["error"]["hint"] == hint
    assert name not in COMMANDS
    assert f"\n  {name} " not in fastcar("--help").stdout


PLUG_IN = """
from fastcar_compile.cli.common import ExitCode, JsonOption, command
from fastcar_compile.errors import UserError

@command
def greet(name: str, as_json: JsonOption = False) -> ExitCode:
    "Greet somebody."
    if name == "nobody":
        raise UserError("nobody is there")
    print(f"hello {name}")
    return ExitCode.MISMATCH
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with a command, and one that cannot be imported."""
    (tmp_path / "foreign.py").write_text(PLUG_IN)
    installed = tmp_path / "foreign-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    points = "[fastcar_compile.commands]\ngreet = foreign:greet\nbroken = foreign.absent:x\n"
    (installed / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plug_in")
def test_a_command_of_another_package(fastcar: Fastcar) -> None:
    assert "\n  greet             Greet somebody.\n" in fastcar("--help").stdout
    result = fastcar("greet", "you")
    assert (result.exit_code, result.stdout) == (ExitCode.MISMATCH, "hello you\n")
    failed = fastcar("greet", "nobody", "--json")
    assert failed.exit_code == ExitCode.USER_ERROR
    assert json.loads(failed.stdout)["error"]["message"] == "nobody is there"


@pytest.mark.usefixtures("plug_in")
def test_a_command_that_cannot_be_imported_breaks_no_other(fastcar: Fastcar) -> None:
    text = fastcar("--help").stdout
    assert "\n  broken            command 'broken' cannot be imported" in text
    assert "\n  doctor            Look for" in text
    assert fastcar("targets").exit_code == ExitCode.OK
    for words in ((), ("a", "--option", "1")):
        result = fastcar("broken", *words)
        assert result.exit_code == ExitCode.USER_ERROR
        assert "command 'broken' cannot be imported: No module named 'foreign.absent'" in result.stderr
        assert "entry point foreign.absent:x" in result.stderr


def test_no_command_shows_help(fastcar: Fastcar) -> None:
    result = fastcar()
    assert result.exit_code == ExitCode.USER_ERROR
    assert result.stdout == fastcar("--help").stdout


@pytest.mark.parametrize(
    ("words", "text", "hint"),
    [
        (("targets", "--speed"), "no such option: --speed", "see `fastcar targets --help`"),
        (("inspect",), "missing argument 'artifact'", "see `fastcar inspect --help`"),
        (("compiel",), "no such command 'compiel'. Did you mean 'compile'?", "see `fastcar --help`"),
        (("run", "x", "--num-tokens", "0"), "invalid value for '--num-tokens'", "see `fastcar run --help`"),
    ],
)
def test_a_wrong_call_is_a_user_error(fastcar: Fastcar, words: tuple[str, ...], text: str, hint: str) -> None:
    result = fastcar(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {text}")
    assert result.stderr.endswith(f"\n  hint:  {hint}\n")
    as_json = fastcar(*words, "--json")
    error = json.loads(as_json.stdout)["error"]
    assert (as_json.exit_code, as_json.stderr) == (2, "")
    assert (error["type"], error["hint"], error["exit_code"]) == ("UserError", hint, 2)
    assert error["message"].startswith(text)


def test_completion_names_the_targets() -> None:
    words = {"COMP_WORDS": "fastcar targets zcu10", "COMP_CWORD": "2", "_FASTCAR_COMPLETE": "complete_bash"}
    found = CliRunner().invoke(app, env=words, prog_name="fastcar").stdout
    assert found.split() == ["zcu102", "zcu104", "zcu104-sodimm"]


def test_a_pipe_gets_no_colour_box_or_fold(fastcar: Fastcar) -> None:
    result = fastcar("targets")
    assert (result.stderr, result.stdout.isascii(), "\x1b" in result.stdout) == ("", True, False)
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + len(fc.available_targets())
    assert lines[0].split() == ["target", "part", "host", "LUT", "DSP", "BRAM36", "URAM", "GB/s", "MHz"]


@pytest.mark.parametrize("environment", first_often([{}, {"PYTHONUNBUFFERED": "1"}]), ids=["at the end", "inside"])
def test_a_reader_that_goes_ends_the_command_without_a_word(environment: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PROGRAM, "targets"], stdout=writer, stderr=subprocess.PIPE, env=os.environ | environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("shell", "code", "text"),
    [("exec >&- 2>&-", 0, ""), ("exec >/dev/full", 2, "error: No space left on device")],
)
def test_an_output_that_cannot_be_written(shell: str, code: int, text: str) -> None:
    command = ["sh", "-c", f'{shell}; "$@"', "sh", *PROGRAM, "targets"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.partition("\n")[0] == text


def test_a_terminal_gets_bold_titles() -> None:
    parent, child = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm-256color", "NO_COLOR": ""}
    process = subprocess.Popen([*PROGRAM, "targets", "zcu102"], stdout=child, stderr=child, env=environment)
    os.close(child)
    data = b""
    while chunk := _read(parent):
        data += chunk
    assert process.wait() == 0
    os.close(parent)
    assert "\x1b[1mbudget" in data.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports the end of a terminal as an error
        return b""


def test_interrupt_while_importing(tmp_path: Path) -> None:
    """A `typer` that never ends importing stands for the first second of any command."""
    (tmp_path / "typer.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [*PROGRAM, "targets"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(600):
        if (tmp_path / "begun").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("name", fc._REMOVED)
def test_a_removed_name_names_its_successor(name: str) -> None:
    with pytest.raises(fc.UserError, match=rf"fastcar_compile\.{name} was removed") as caught:
        getattr(fc, name)
    assert fc._REMOVED[name] in str(caught.value)
    assert name not in fc.__all__
    if name != "simulate":
        module, _, own = fc._REMOVED[name].rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), own), type)
