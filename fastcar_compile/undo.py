"""What is undone when a signal ends the process at once. A `with` block undoes the same when it is left otherwise.

An exception that a signal raises can be swallowed on its way up: in the import of a library, in a callback from C++,
in a finaliser. So the `fastcar` command does not raise one. Its handler calls `undo_all` and ends the process.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_actions: list[Callable[[], object]] = []
_unbroken: list[None] = []
_postponed: list[int] = []


@contextmanager
def undone(action: Callable[[], object]) -> Generator[None]:
    """Call `action` when the block is left, or when a signal ends the process inside of it.

    A signal may come at any point of the block, and of `action` itself. So `action` must be one that can run twice.
    """
    _actions.append(action)
    try:
        yield
    finally:
        action()
        with suppress(ValueError):  # `undo_all` has taken it
            _actions.remove(action)


@contextmanager
def scratch_folder(parent: str | Path | None = None, prefix: str = "fastcar-") -> Generator[Path]:
    """Yield a new folder in `parent`, or where the system has temporary files; it is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with undone(lambda: shutil.rmtree(folder, ignore_errors=True)):
        yield folder


@contextmanager
def unbroken() -> Generator[None]:
    """Have a signal that arrives inside of the block end the process after it.

    For what is made first and registered then, such as a child process.
    """
    _unbroken.append(None)
    try:
        yield
    finally:
        _unbroken.pop()
        if _postponed and not _unbroken:
            signal.raise_signal(_postponed.pop())


def postponed(number: int) -> bool:
    """Return whether a signal has to wait for the end of an `unbroken` block, where it is raised again."""
    if _unbroken:
        _postponed.append(number)
    return bool(_unbroken)


def undo_all() -> None:
    """Undo everything, the newest first."""
    while _actions:
        with suppress(Exception):
            _actions.pop()()
