"""The right to write one artifact folder: a lock, and what builds that were killed left beside the folder.

Beside the folder NAME, and only while a build or a change of thresholds runs or after one was killed:

| name | what it is |
|---|---|
| `.NAME.lock` | locked by the one process that may write NAME |
| `.NAME.building-XXXXXXXX` | files of a build; after an exchange, the artifact that was replaced |
| `.NAME.old-XXXXXXXX` | the artifact that is being replaced, where two names cannot be exchanged |
| `.NAME.manifest-XXXXXXXX` | a manifest with other thresholds, or a signature |

The lock is the kernel's and ends with its process. So whoever holds it knows that these belong to nobody else.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.artifact.write_errors import write_error
from fastcar_compile.errors import ArtifactError

if TYPE_CHECKING:
    from filelock import FileLock


class Claim:
    """Holds the lock of one artifact folder; use it as a context manager.

    Entering it puts an artifact back that a killed build had moved away, and removes what killed builds left. Leaving
    it removes everything beside the folder, and parent folders that were made and are empty.

    Args:
        path: the artifact folder, which need not exist.

    Attributes:
        building, old, manifest: the names of the table above.

    Raises:
        ArtifactError: another process holds the lock, or the place cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        token = secrets.token_hex(4)
        self.building, self.old, self.manifest = (
            path.parent / f".{path.name}.{kind}-{token}" for kind in ("building", "old", "manifest")
        )
        self._lock: FileLock | None = None
        self._made_parents: list[Path] = []

    def __enter__(self) -> Self:
        parent = self.path.parent
        try:
            # These parents are removed again if the build fails and leaves them empty.
            self._made_parents = [folder for folder in (parent, *parent.parents) if not folder.exists()]
            parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            self._restore()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise write_error(error, self.path) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._made_parents = []
        self._release()

    def _release(self) -> None:
        """Remove everything beside the folder and end the lock."""
        if self._lock is not None and self._lock.is_locked:
            with suppress(OSError):  # what cannot be removed now, the next build reports
                self._restore()
            # While the lock is held: a process that waits for this file finds it without a name, and makes its own.
            with suppress(OSError):
                _lock_file(self.path).unlink(missing_ok=True)
            self._lock.release(force=True)
        for folder in self._made_parents:
            try:
                folder.rmdir()
            except OSError:
                break

    def _restore(self) -> None:
        """Put a moved artifact back, then remove what belongs to no living process."""
        moved = moved_artifact(self.path)
        if moved is not None:
            os.rename(moved, self.path)
        for path in _leftovers(self.path):
            if path.is_dir():
                _remove_folder(path)
            else:
                path.unlink(missing_ok=True)


def moved_artifact(path: Path) -> Path | None:
    """Return where the artifact `path` is, if a build was killed between moving it away and putting the new one there.

    None: there is something at `path`, or no such build was.
    """
    if path.exists() or path.is_symlink() or not path.parent.is_dir():
        return None
    prefix = f".{path.name}.old-"
    found = (p for p in _leftovers(path) if p.name.startswith(prefix) and (p / MANIFEST).is_file())
    return next(found, None)


def _leftovers(path: Path) -> Iterator[Path]:
    """Yield what stands beside the folder under the names of the table, the lock aside."""
    folder = re.compile(rf"\.{re.escape(path.name)}\.(building|old)-[0-9a-z_]{{8}}")
    file = re.compile(rf"\.{re.escape(path.name)}\.manifest-[0-9a-z_]{{8}}")
    for entry in sorted(os.scandir(path.parent), key=lambda e: e.name):
        is_folder = entry.is_dir(follow_symlinks=False)
        if (folder if is_folder else file).fullmatch(entry.name) and not entry.is_symlink():
            yield Path(entry.path)


def _remove_folder(path: Path) -> None:
    """Remove a folder into which a linker that outlived its build may still put a file."""
    # The linker may write between the listing and the removal, so a removal that failed is tried again.
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    shutil.rmtree(path)


def _lock_file(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


def _locked(path: Path) -> FileLock:
    """Return the lock, held.

    Raises:
        ArtifactError: another process, or another thread of this one, holds it. OSError: there can be none.
    """
    from filelock import FileLock, Timeout

    # Another thread than the one that took the lock may release it.
    lock = FileLock(_lock_file(path), thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if not _lock_file(path).exists():
            _lock_file(path).touch()  # raises, where the system makes no file here
        holder = _holder(_lock_file(path))
        who = "another build" if holder is None else f"another build (process {holder})"
        hint = "wait until it is done, or choose another output folder"
        raise ArtifactError(f"{who} is writing this folder", where=str(path), hint=hint) from None
    return lock


def _holder(file: Path) -> int | None:
    """Return the process that holds a lock, as far as the kernel tells this one."""
    try:
        inode = str(file.stat().st_ino)
        lines = Path("/proc/locks").read_text("ascii").splitlines()
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  WRITE 4242 fe:00:2147361 0 EOF"
    fields = (line.split() for line in lines)
    found = (int(f[4]) for f in fields if len(f) > 5 and f[1] == "FLOCK" and f[5].rpartition(":")[2] == inode)
    return next((process for process in found if process > 0), None)
