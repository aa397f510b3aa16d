"""Files are hashed once per process, but always after a change."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from fastcar_compile.artifact import digest
from fastcar_compile.artifact.digest import file_sha256


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    found: list[str] = []
    real = hashlib.file_digest

    def counted(stream: object, *args: object) -> object:
        found.append(Path(stream.name).name)  # pyright: ignore[reportAttributeAccessIssue]
        return real(stream, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return found


def test_an_unchanged_file_is_read_once(tmp_path: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "SETTLED_NS", 0)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    expected = hashlib.sha256(b"one").hexdigest()
    assert [file_sha256(path), file_sha256(path)] == [expected, expected]
    moved = path.rename(tmp_path / "b")  # the inode's time changes
    assert file_sha256(moved) == expected
    assert readings in (["a"], ["a", "b"])


def test_a_change_is_seen_even_with_its_time_put_back(
    tmp_path: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "SETTLED_NS", 0)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    times = path.stat()
    time.sleep(0.05)
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_sha256(path) == hashlib.sha256(b"two").hexdigest()
    assert readings == ["a", "a"]


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, readings: list[str]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    file_sha256(path)
    file_sha256(path)
    assert readings == ["a", "a"]
