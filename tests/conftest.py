"""Shared fixtures. A test whose tool is missing is skipped by name; with CI=true it fails instead."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # One worker per core: threads of torch would only wait for each other. Set before anything imports torch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a background job of a shell. Commands that a test starts and interrupts would inherit that and never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = (
    "test_full_video.py",
    "test_board_backend.py",
    "test_commands.py",
    "test_checkpoint.py",
    "test_board_program.py",
    "test_hls.py",
    "test_host_variants.py",
    "test_real_artifact.py",
    "test_simulate.py",
    "test_offload_linears.py",
)
"""Files that take minutes with few tests. They begin first and in this order, so that no worker ends alone with
one of them, and that the two that share artifacts of a board do not wait for each other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of `LONG` first; `make test` keeps xdist from sorting them by their number of tests."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: the cyclic collector does not walk it again during the tests, which
    takes a tenth of their time."""
    gc.collect()
    gc.freeze()


def shared_folder(folders: pytest.TempPathFactory) -> Path:
    """A folder of this run that all its test processes have in common."""
    root = folders.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def missing(text: str) -> None:
    """Skips the running test for a missing tool or package, or fails it where CI=true."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"{text}; with CI=true this is a failure, not a skip", pytrace=False)
    pytest.skip(text)


def check_tool(name: str) -> str:
    """The path of the program `name`; skips (or in CI fails) the test when it is not on PATH."""
    path = shutil.which(name)
    if path is None:
        missing(f"tool missing: {name}")
    assert path is not None
    return path


def check_module(name: str) -> None:
    """Skips (or in CI fails) the test when the Python package `name` cannot be found. It is not imported."""
    if importlib.util.find_spec(name) is None:
        missing(f"package missing: {name}")


@pytest.fixture
def require_tool() -> Callable[[str], str]:
    """`require_tool("g++")` returns its path or skips the test by name (fails where CI=true)."""
    return check_tool


@pytest.fixture
def require_module() -> Callable[[str], None]:
    """`require_module("hls4ml")` skips the test by name when the package is missing (fails where CI=true)."""
    return check_module
