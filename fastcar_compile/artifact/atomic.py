"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def sync(path: Path) -> None:
    """Writes a file or folder entry through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(source: Path, destination: Path) -> None:
    """Renames source to destination; an old destination is moved aside first, and back if the rename fails."""
    if not destination.exists():
        source.rename(destination)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{destination.name}.old-", dir=destination.parent))
    destination.rename(aside / "artifact")
    try:
        source.rename(destination)
    except OSError:
        (aside / "artifact").rename(destination)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
