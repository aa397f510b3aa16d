"""SHA-256 of files, each state of a file read once per process; and the digest that names an artifact."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

_Identity = tuple[int, int, int, int, int]

SETTLED_NS = 1_000_000_000
"""A digest is remembered only of a file whose last change is this long past: file systems' clocks tick, and a change
within the same tick would leave no trace."""

DIGEST_PREFIX = "sha256:"
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"

_known: dict[_Identity, str] = {}


def manifest_digest(data: bytes) -> str:
    """Return the digest of an artifact whose manifest.json has these bytes, `sha256:` and 64 hex digits."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in 64 hex digits.

    A file that has not changed since this process read it (device, inode, size, time of the last change of contents and
    of the inode) is not read again. The inode's time cannot be set back, so that a changed file is always read.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        before = _identity(stream.fileno())
        if before in _known:
            return _known[before]
        settled = time.time_ns() - before[-1] > SETTLED_NS
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if settled and _identity(stream.fileno()) == before:
            _known[before] = digest
        return digest


def _identity(handle: int) -> _Identity:
    found = os.fstat(handle)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
