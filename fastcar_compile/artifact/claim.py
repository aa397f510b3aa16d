"""The right to write one artifact folder: a lock, and a folder beside it for files that are not in place yet.

These names stand beside the folder NAME only while a build or a change of thresholds runs, or after a kill of one:

| name | what it is |
|---|---|
| `.NAME.lock` | locked by the one process that may write NAME |
| `.NAME.building-XXXXXXXX` | the files of a build; in it `old`, the artifact that is being replaced |

The lock is the kernel's and ends with its process. So the process that holds it knows that no other process uses them.
"""

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.errors import ArtifactError
from fastcar_compile.support.files import sync

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that only a write gives."""

OLD = "old"


def write_error(error: OSError, path: Path) -> ArtifactError:
    """Return the error for a file or folder at or below `path` that cannot be written."""
    text = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        free = os.statvfs(next(folder for folder in path.parents if os.path.exists(folder)))
        # File systems such as Btrfs report no number of inodes: there, zero free inodes mean nothing.
        no_inode = free.f_files and not free.f_favail
        text += " (no inode is free)" if no_inode else f" ({free.f_bavail * free.f_frsize:,} bytes are free)"
    hint = "make room or correct the permissions, or choose another output folder"
    return ArtifactError(f"the output folder cannot be written: {text}", where=str(path), hint=hint)


def put(new: Path, place: Path, mode: int) -> None:
    """Put a written file in its place atomically: its bytes reach the disk before its name does."""
    new.chmod(mode)
    sync(new)
    os.replace(new, place)
    sync(place.parent)


@contextmanager
def claimed(path: Path) -> Generator[Path]:
    """Hold the lock of an artifact folder, which need not exist, and yield an empty folder beside it.

    First, an artifact that a killed build had moved away is put back, and the files of killed builds are removed. The
    end removes everything beside the folder, and parent folders that were made and are empty.

    Raises:
        ArtifactError: another process holds the lock, or the place cannot be written.
    """
    from filelock import FileLock, Timeout

    # Another thread than the one that took the lock may release it.
    lock = FileLock(path.parent / f".{path.name}.lock", thread_local=False)
    made = [folder for folder in path.parents if not os.path.exists(folder)]
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            Path(lock.lock_file).touch()  # where the system makes no file, filelock says that somebody holds it
            lock.acquire(blocking=False)
            _clean(path)
            building = Path(tempfile.mkdtemp(prefix=f".{path.name}.building-", dir=path.parent))
        except Timeout:
            hint = "wait until it is done, or choose another output folder"
            raise ArtifactError("another build is writing this folder", where=str(path), hint=hint) from None
        except OSError as error:
            raise write_error(error, path) from error
        yield building
    finally:
        if lock.is_locked:
            with suppress(OSError):  # the next build reports a file that cannot be removed now
                _clean(path)
            # While the lock is held: a process that waits for this file finds it without a name, and makes its own.
            with suppress(OSError):
                os.unlink(lock.lock_file)
            lock.release(force=True)
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def moved_artifact(path: Path) -> Path | None:
    """Return the place of the artifact `path` after a build was killed between the two renames.

    None: `path` exists, or no build was killed there.
    """
    moved = (folder / OLD for folder in _leftovers(path) if (folder / OLD / MANIFEST).is_file())
    return None if os.path.lexists(path) else next(moved, None)


def _clean(path: Path) -> None:
    """Put a moved artifact back, then remove the files of dead processes."""
    moved = moved_artifact(path)
    if moved is not None:
        os.rename(moved, path)
    for folder in _leftovers(path):
        # A linker that outlived its build may write between the listing and the removal, which is tried again then.
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(folder)


def _leftovers(path: Path) -> list[Path]:
    """Return the folders beside `path` that `tempfile` made for it."""
    found = path.parent.glob(f".{glob.escape(path.name)}.building-" + "[a-z0-9_]" * 8)
    return sorted(folder for folder in found if folder.is_dir() and not folder.is_symlink())
