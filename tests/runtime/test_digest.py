"""A file is read each time, unless the caller keeps digests; a changed file is read always."""

import hashlib
import os
import pwd
import threading
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from fastcar_compile.artifact import digest
from fastcar_compile.artifact.digest import Digests, UserDigests
from fastcar_compile.errors import UserError


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each file that was read."""
    found: list[int] = []
    real = digest.blocks

    def counted(descriptor: int) -> Generator[memoryview]:
        found.append(1)
        return real(descriptor)

    monkeypatch.setattr(digest, "blocks", counted)
    return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size", [0, 7, 8, 9, 24, 1001])
def test_every_byte_is_hashed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    real = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:5]], offset)

    for name, size_in_bytes in (("_BLOCK", 8), ("_FETCHED", 16), ("_AHEAD", 64)):
        monkeypatch.setattr(digest, name, size_in_bytes)
    monkeypatch.setattr(os, "preadv", short)
    data = np.random.default_rng(size).bytes(size)
    path = tmp_path / "a"
    path.write_bytes(data)
    assert Digests().of_path(path) == sha256(data)


def test_a_reading_that_ends_early_leaves_no_thread(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(3 << 20))
    before = threading.active_count()
    with path.open("rb") as stream:
        reading = digest.blocks(stream.fileno())
        next(reading)
        reading.close()
    assert threading.active_count() == before


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


def test_a_user_without_a_home_folder_sets_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(_number: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setenv(digest.CACHE, str(tmp_path))
    assert digest.cache_folder() == tmp_path
    monkeypatch.delenv(digest.CACHE)
    with pytest.raises(UserError, match=r"no home folder(.|\n)*set FASTCAR_CACHE"):
        digest.cache_folder()


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
