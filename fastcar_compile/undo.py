"""What is undone when a signal ends the process at once. A `with` block undoes the same when it is left otherwise.

An exception that a signal raises can be swallowed on its way up: in the import of a library, in a callback from C++,
in a finaliser. So the `fastcar` command does not raise one. Its handler calls `undo_all` and ends the process.
"""

from __future__ import annotations

import fcntl
import os
import re
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
    """Yield a new folder in `parent`, or where the system has temporary files; it is removed afterwards.

    With a parent, those of the same prefix that killed processes left there are removed first. A folder belongs to a
    living process while that process holds its lock, which the kernel ends with the process.
    """
    if parent is not None:
        _remove_leftovers(Path(parent), prefix)
    folder, lock = _locked_folder(parent, prefix)
    try:
        with undone(lambda: shutil.rmtree(folder, ignore_errors=True)):
            yield folder
    finally:
        os.close(lock)


def _locked_folder(parent: str | Path | None, prefix: str) -> tuple[Path, int]:
    """Make a folder; return it and the descriptor that holds its lock, if its file system has locks."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            descriptor = _open(folder)
        except FileNotFoundError:  # another process took it for a leftover before it was locked
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the same, while that process removes it
            os.close(descriptor)
            continue
        except OSError:
            pass
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _open(folder: str | Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    name = re.compile(rf"{re.escape(prefix)}[0-9a-z_]{{8}}")
    for entry in sorted(os.scandir(parent), key=lambda e: e.name):
        if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            _remove_leftover(entry.path)


def _remove_leftover(folder: str) -> None:
    """Remove a folder without an owner; do nothing where there is one, or where that cannot be known."""
    with suppress(OSError):
        descriptor = _open(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


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
