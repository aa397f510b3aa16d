"""What the system says about a file that cannot be written -> an error with a place and a hint."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from fastcar_compile.errors import ArtifactError

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
