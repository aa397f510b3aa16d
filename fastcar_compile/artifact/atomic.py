"""Folders that are there whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

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
