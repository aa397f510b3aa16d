"""Shared fixtures. A test whose tool is missing is skipped by name; with CI=true it fails instead."""

import gc
import hashlib
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings

gc.disable()  # until the tests are collected: while modules are imported hardly anything becomes garbage

os.environ.pop("COLUMNS", None)  # some shells export it, and it folds what commands print

# Builds of tests, and of processes that they start, are made anew: a test may replace a part of the compiler, which no
# key tells, and one of equal bytes would compare a build with itself. `test_cache.py` names caches of its own.
os.environ["FASTCAR_NO_CACHE"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    # One worker per core: threads of torch would only wait for each other. Set before anything imports torch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a background job of a shell. Commands that a test starts and interrupts would inherit that and never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = (
    "test_full_video.py", "test_board_backend.py", "test_commands.py", "test_checkpoint.py", "test_board_program.py",
    "test_hls.py", "test_host_variants.py", "test_real_artifact.py", "test_offload_linears.py",
)  # fmt: skip
"""Files that take minutes with few tests. They begin first and in this order, so that no worker ends alone with
one of them, and that the two that share artifacts of a board do not wait for each other."""


# Under CI Hypothesis has no deadline by itself. Elsewhere a busy machine should not fail a test either.
if "CI" not in os.environ:
    settings.register_profile("local", deadline=None)
    settings.load_profile("local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of `LONG` first; `make test` keeps xdist from sorting them by their number of tests."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: the cyclic collector does not walk it again during the tests. It
    begins less often than Python has it. Without all this it takes a fifth of the time of collecting and of the tests.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


class Made(dict[Any, Any]):
    """Values that `make(key)` makes when a test asks for them. It is typed where it is a fixture's result."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __missing__(self, key: Any) -> Any:
        self[key] = self.make(key)
        return self[key]


def shared_folder(folders: pytest.TempPathFactory) -> Path:
    """A folder of this run that all its test processes have in common."""
    root = folders.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def built_once(folders: pytest.TempPathFactory, name: str, build: Callable[[Path], Any]) -> Any:
    """The artifact that `build(folder)` makes in one of the test processes, opened in all."""
    import fastcar_compile

    folder = shared_folder(folders) / name
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():  # it gets its name when it is complete
            build(folder)
    return fastcar_compile.load(folder)


TYPES = "#include <ap_int.h>\n#include <hls_stream.h>\n"
"""What every source of a kernel includes. Reading it takes most of the time of a small one."""

Precompiled = Callable[[Sequence[str]], list[str]]
"""`precompiled(flags)`: what g++ gets with these flags, so that a source finds `TYPES` already read."""


@pytest.fixture(scope="session")
def precompiled(tmp_path_factory: pytest.TempPathFactory) -> Precompiled:
    """Made once for all test processes. g++ ignores a precompiled header that was made with other flags."""
    folder = shared_folder(tmp_path_factory) / "precompiled"

    def options(flags: Sequence[str]) -> list[str]:
        header = folder / hashlib.sha256("\0".join(flags).encode()).hexdigest()[:16] / "types.hpp"
        header.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(header.with_suffix(".lock")):
            if not header.with_suffix(".hpp.gch").is_file():
                header.write_text(TYPES)
                command = [check_tool("g++"), *flags, "-x", "c++-header", str(header), "-o", f"{header}.partial"]
                subprocess.run(command, check=True)
                os.replace(f"{header}.partial", f"{header}.gch")
        return ["-include", str(header)]

    return options


@pytest.fixture(scope="session", autouse=True)
def quick_simulations(precompiled: Precompiled) -> None:
    """Where many tests run, C simulations are built in half the time: with little optimisation and precompiled types.
    As users have them they are built by the test benches and by the commands of the documents."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not shutil.which("g++") or not importlib.util.find_spec("hls4ml"):
        return
    from fastcar_compile.runtime.backends import hls_csim as build

    # With -O1 g++ warns of variables of the types' own, which it cannot follow.
    build.FLAGS[:] = [*(flag.replace("-O2", "-O1") for flag in build.FLAGS), "-Wno-maybe-uninitialized"]
    compiled = [flag for flag in build.FLAGS if flag != "-shared"]
    build.FLAGS += precompiled([*compiled, "-isystem", str(build.ap_types_folder())])


class _NotBuilt:
    """A lowered module whose library is a file that nothing can load."""

    def __init__(self, lowered: Any) -> None:
        self.part = lowered.part

    def retarget(self, _isa: object) -> "_NotBuilt":
        return self

    def export(self, path: Path, *_options: object) -> None:
        path.write_text("made by a test that does not load it")

    export_objects = export


_BOARDS = pytest.MonkeyPatch()


@pytest.fixture(scope="session", autouse=True)
def quick_boards() -> None:
    """Where many tests run, builds leave out the library for a board's own CPU, a quarter of their time. Those of tests
    that load it are inside of `board_libraries`.
    """
    _leave_out_boards()


def _leave_out_boards() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from fastcar_compile.codegen.tvm import emit

        real = emit.emit_board

        def without_library(host: emit.HostLibraries, board: Any) -> Any:
            quick = replace(host)
            vars(quick)["lowered"] = _NotBuilt(host.lowered)
            return real(quick, board)

        _BOARDS.setattr(emit, "emit_board", without_library)


@contextmanager
def board_libraries() -> Generator[None]:
    """What is built inside has the library for the board's CPU."""
    _BOARDS.undo()
    try:
        yield
    finally:
        _leave_out_boards()


@contextmanager
def imported(folders: Sequence[Path], names: Sequence[str]) -> Generator[SimpleNamespace]:
    """Modules by the last part of their names, imported as the scripts of these folders import them. They and what else
    came from the folders are forgotten at the end."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*map(str, folders), *sys.path])
        try:
            yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
        finally:
            for name in set(sys.modules) - before:
                if any(Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(f) for f in folders):
                    del sys.modules[name]


def fresh_process(*words: object, without: tuple[str, ...] = (), inside: Sequence[str] = ()) -> str:
    """What Python prints in a process of its own, which finds the package and the tests.

    words: its arguments. without: beginnings of environment variables that the process does not get. inside: a command
    that runs another one, such as unshare.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, Path(__file__).parents[:2]))
    command = [*inside, sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def first_often(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The first ones in every run, such as this machine's best instruction set, the others in `make thorough`."""
    own = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if i < count else pytest.mark.thorough) for i, case in enumerate(own)]


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


@pytest.fixture(scope="session")
def crafter_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of examples/crafter, put together as `make play` does, by a Python without packages."""
    root, folder = Path(__file__).parents[1], tmp_path_factory.mktemp("crafter") / "page"
    command = [sys.executable, "-I", "-S", "play/fastcar_play/player.py", "examples/crafter/page", str(folder)]
    subprocess.run(command, cwd=root, timeout=60, check=True)
    return folder


@pytest.fixture
def require_tool() -> Callable[[str], str]:
    """`require_tool("g++")` returns its path or skips the test by name (fails where CI=true)."""
    return check_tool


@pytest.fixture
def require_module() -> Callable[[str], None]:
    """`require_module("hls4ml")` skips the test by name when the package is missing (fails where CI=true)."""
    return check_module
