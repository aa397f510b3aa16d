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

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.errors import ArtifactError

if TYPE_CHECKING:
    from filelock import FileLock


# What the system says about a file that cannot be written -> an error with a place and a hint.


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Only a write gives these."""

_HINTS = {
    errno.ENOSPC: "free some space, or choose an output folder on another file system",
    errno.EDQUOT: "free some space of this user's quota, or choose an output folder on another file system",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or choose another file system",
    errno.EROFS: "choose an output folder on a file system that can be written",
    errno.EACCES: "choose an output folder that this user may write, or change its permissions",
    errno.EPERM: "choose an output folder that this user may write, or change its permissions",
    errno.ENAMETOOLONG: "choose an output folder with a shorter name",
    errno.ENOTDIR: "choose an output folder whose parents are folders",
}


def write_error(error: OSError, path: Path) -> ArtifactError:
    """Return the error for a file or folder at or below `path` that cannot be written."""
    hint = _HINTS.get(error.errno or 0, "choose another output folder")
    text = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        text += f" ({free_text(path)})"
    return ArtifactError(f"the output folder cannot be written: {text}", where=str(path), hint=hint)


def free_text(path: Path) -> str:
    """Return what is left on the file system that `path` would be on: bytes, or that there are no more inodes."""
    place = existing_parent(path)
    figures = os.statvfs(place)
    # File systems such as Btrfs report no number of inodes: there, zero free ones mean nothing.
    if figures.f_files and not figures.f_favail:
        return "no inode is free"
    return f"{shutil.disk_usage(place).free:,} bytes are free"


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # False where it may not look


# Folders that are there whole or not at all.


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Of linux/fs.h: both names exist before and after, and at no moment is one of them missing."""


def sync(path: Path) -> None:
    """Write a file or folder entry through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(source: Path, destination: Path, aside: Path) -> None:
    """Put the folder `source` in the place of `destination`, which is missing, empty, or a folder to replace.

    The old folder is at `source` afterwards, or at `aside` where the file system cannot exchange two names. There, a
    kill between the two renames leaves no `destination`: `aside` has to be renamed back.

    Raises:
        OSError: nothing was replaced.
    """
    # rename() replaces an empty folder by itself; only a folder with files needs an exchange.
    if not destination.exists() or not any(destination.iterdir()):
        os.rename(source, destination)
        return
    if exchange(source, destination):
        return
    os.rename(destination, aside)
    try:
        os.rename(source, destination)
    except BaseException:
        os.rename(aside, destination)
        raise


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the file system or the C library cannot.

    Raises:
        OSError: it can, and failed.
    """
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    # The kernel or the file system does not know the flag: every other error is about these files.
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


@cache
def _renameat2() -> Any:
    """Return the C library's function (glibc 2.28, musl 1.2.4), or None."""
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        function.restype = ctypes.c_int
    return function


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
