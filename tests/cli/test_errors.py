"""Exit codes, error forms and the small parsers that all commands share."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastcar_compile
from fastcar_compile.cli.options import parse_thresholds
from fastcar_compile.errors import InternalError, UserError

from .conftest import FakeArtifact, Fastcar, refused


def refuse_with(error: BaseException) -> Callable[..., Any]:
    def load(path: Path) -> Any:
        raise error

    return load


@pytest.mark.parametrize("error", [InternalError("broken invariant"), ZeroDivisionError("division by zero")])
def test_internal_error(fastcar: Fastcar, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(fastcar_compile, "load", refuse_with(error))
    result = fastcar("inspect", "x")
    assert result.exit_code == 3
    assert f"internal error: {error}" in result.stderr
    assert "a defect of fastcar_compile" in result.stderr
    assert "Traceback" not in result.output
    as_json = fastcar("inspect", "x", "--json")
    expected = {"type": type(error).__name__, "message": str(error), "exit_code": 3}
    assert (as_json.exit_code, json.loads(as_json.stdout)) == (3, {"error": expected})


def test_traceback_on_request(fastcar: Fastcar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastcar_compile, "load", refuse_with(InternalError("broken invariant")))
    monkeypatch.setenv("FASTCAR_TRACEBACK", "1")
    assert isinstance(fastcar("inspect", "x").exception, InternalError)


def test_interrupt(fastcar: Fastcar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastcar_compile, "load", refuse_with(KeyboardInterrupt()))
    result = fastcar("inspect", "x")
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize("words", [[], ["--json"]])
@pytest.mark.filterwarnings("always::UserWarning")
def test_warnings_are_one_line_on_stderr(
    fastcar: Fastcar, monkeypatch: pytest.MonkeyPatch, fake: FakeArtifact, words: list[str]
) -> None:
    def load(path: Path) -> FakeArtifact:
        warnings.warn("256 tokens [per frame] assumed", UserWarning, stacklevel=2)
        return fake

    monkeypatch.setattr(fastcar_compile, "load", load)
    result = fastcar("inspect", "x", "--before", *words)
    assert result.exit_code == 0
    assert "warning: 256 tokens [per frame] assumed" in result.stderr
    assert "warning" not in result.stdout


@pytest.mark.parametrize(
    ("text", "value"), [("1.5", 1.5), ("-inf", -math.inf), ("none", math.inf), ("1, none,INF", [1.0, None, math.inf])]
)
def test_thresholds(text: str, value: Any) -> None:
    assert parse_thresholds(text) == value


@pytest.mark.parametrize("text", ["high", "1,,2", "nan", ""])
def test_bad_thresholds(text: str) -> None:
    with pytest.raises(UserError, match="is not a threshold") as caught:
        parse_thresholds(text)
    assert f"--threshold {text}" in caught.value.where


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        ("run", [], "exactly one of --prompt and --prompt-file is needed"),
        ("run", ["--prompt", "a b"], "the prompt 'a b' is not a list of token ids"),
        ("run", ["--prompt", "1", "--temperature", "1", "--top-p", "2"], "error: --top-p is 2.0"),
        ("run", ["--prompt", "1", "--guidance", "2"], "guidance needs the unconditional prompts too"),
        ("run", ["--prompt", "1", "--negative-prompt", "2"], "--negative-prompt is for pairs of rows"),
        ("run", ["--prompt", "1", "--guidance", "2", "--negative-prompt", "2 3"], "the negative prompt 2"),
        ("run", ["--prompt", "1", "--output", "out.txt"], "the output out.txt is not a .npy file"),
        ("run", ["--prompt", "1", "--backend", "gpu"], "unknown backend 'gpu'"),
        ("run", ["--prompt-file", "none.npy"], "the prompt file does not exist"),
        ("verify", ["--tokens", "32"], "32 decode steps after a prompt of 1 token do not fit max_seq_len 32"),
        ("verify", ["--backends", ","], "no backend in ','"),
        ("verify", ["--backends", "gpu"], "unknown backend 'gpu'"),
        ("inspect", ["--before", "--after"], "--before and --after cannot be given together"),
        ("inspect", ["--explain", "--layer", "1", "--node", "a"], "--layer and --node cannot be given together"),
        ("inspect", ["--layer", "1"], "--layer needs --explain"),
    ],
)
def test_bad_input(fastcar: Fastcar, command: str, words: list[str], text: str) -> None:
    refused(fastcar(command, "x", *words), text)
