"""Packages of extras are missed before any work, and what was computed is kept."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastcar_compile as fc
from fastcar_compile.artifact.trust import Requirements
from fastcar_compile.cli import verify
from fastcar_compile.errors import BackendError
from fastcar_compile.tune.evaluate import Study

from .conftest import Fastcar, refused


def missing(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let these packages be none that is installed."""
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)


def fail(*_args: object, **_options: object) -> Any:
    raise AssertionError("work began")


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("evaluate x --videos v.npy --cases c --plots out", "matplotlib", "evaluate"),
        ("sign x --key k.pem", "model_signing", "sign"),
        ("run x --prompt 1 --public-key k.pub", "model_signing", "sign"),
    ],
)
def test_an_extra_is_missed_before_any_work(
    fastcar: Fastcar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, package: str, extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", np.zeros((1, 9), np.int64))
    missing(monkeypatch, package)
    refused(fastcar(*words.split()), f"the package {package} is not installed", f'"fastcar_compile[{extra}]"')
    assert not Path("out").exists()


def test_an_extra_is_missed_in_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing(monkeypatch, "skimage", "model_signing")
    calls: dict[str, Callable[[], object]] = {
        "skimage": lambda: Study(fail, np.zeros((1, 9), np.int64), decoder="", detokenize=fail),  # pyright: ignore[reportArgumentType]
        "model_signing": lambda: Requirements.of(require_signature=tmp_path / "key"),
    }
    for package, call in calls.items():
        with pytest.raises(BackendError, match=f"the package {package} is not installed"):
            call()
    with pytest.raises(BackendError, match="the package model_signing is not installed"):
        fc.sign(tmp_path / "none", tmp_path / "key")


def test_a_tool_is_missed_before_another_backend_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match="needs no-such-compiler"):
        verify.require_backends(["cpu", "hls-csim"])
    missing(monkeypatch, "fastcar_compile.runtime.backends.ort", "onnxruntime")
    with pytest.raises(BackendError, match="unknown backend 'gpu'"):
        verify.require_backends(["cpu", "gpu"])


def test_the_hint_of_play_works_in_a_checkout(fastcar: Fastcar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcar_compile.cli.commands.entry_points", lambda **_: ())
    refused(fastcar("play"), "the command `fastcar play` is not installed", "pip install ./play")
    refused(fastcar("explore"), "the command `fastcar explore` was removed", "`fastcar evaluate` for quality")
    assert (Path(__file__).parents[2] / "play" / "pyproject.toml").is_file()
