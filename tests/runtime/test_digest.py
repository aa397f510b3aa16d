"""A file is read each time, unless the caller keeps digests; a changed file is read always."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from fastcar_compile.artifact import digest
from fastcar_compile.artifact.digest import Digests, UserDigests
from fastcar_compile.errors import UserError


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each file that was read."""
    found: list[int] = []
    real = hashlib.file_digest

    def counted(stream: object, *args: object) -> object:
        found.append(1)
        return real(stream, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_an_unchanged_file_is_read_once(tmp_path: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "SETTLED_NS", 0)
    path, digests = tmp_path / "a", Digests()
    path.write_bytes(b"one")
    assert {digests.of_path(path), digests.of_path(path)} == {sha256(b"one")}
    assert len(readings) == 1
    assert Digests().of_path(path) == sha256(b"one")
    assert len(readings) == 2, "nobody else remembers it"


def test_a_change_is_seen_even_with_its_time_put_back(
    tmp_path: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "SETTLED_NS", 0)
    path, digests = tmp_path / "a", Digests()
    path.write_bytes(b"one")
    times = path.stat()
    time.sleep(0.05)
    assert digests.of_path(path) == sha256(b"one")
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digests.of_path(path) == sha256(b"two")
    assert len(readings) == 2


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, readings: list[int]) -> None:
    path, digests = tmp_path / "a", Digests()
    path.write_bytes(b"one")
    digests.of_path(path)
    digests.of_path(path)
    assert len(readings) == 2


def test_a_user_keeps_digests_from_process_to_process(
    tmp_path: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "SETTLED_NS", 0)
    monkeypatch.setenv(digest.CACHE, str(tmp_path / "cache"))
    path, first = tmp_path / "a", UserDigests()
    path.write_bytes(b"one")
    first.of_path(path)
    first.save()
    assert UserDigests().of_path(path) == sha256(b"one")
    assert len(readings) == 1
    file = tmp_path / "cache" / "digests.json"
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    file.write_text('{"files": "damaged"}')
    assert UserDigests().known == {}
    file.chmod(0o666)
    with pytest.raises(UserError, match="other users may write the digests"):
        UserDigests()
