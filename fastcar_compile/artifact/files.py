"""Files of an artifact: which names are allowed, what is in a folder, and what a file must be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field

from fastcar_compile.artifact.digest import Digests


class FileEntry(BaseModel):
    """What one file must be: SHA-256 as 64 hex digits, size in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, strict=True)


def file_entry(path: Path, digests: Digests) -> FileEntry:
    """Return checksum and size of a file."""
    return FileEntry(sha256=digests.of_path(path), size=path.stat().st_size)


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Return (relative POSIX name, path) of everything below root that is not a plain directory, sorted by name."""
    found: list[tuple[str, Path]] = []
    for folder, subfolders, files in os.walk(root, followlinks=False):
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        for name in [*files, *links]:
            path = Path(folder) / name
            found.append((path.relative_to(root).as_posix(), path))
    return iter(sorted(found))


def name_problem(name: str) -> str | None:
    """Return why `name` may not be a file of an artifact, or None; names are relative POSIX paths without `..`."""
    if not name or "\\" in name or "\0" in name:
        return "is empty or has a backslash or NUL in it"
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == ".":
        return "leaves the artifact's folder or is not in plain relative form"
    return None
