"""What a caller gets of an artifact is what was checked, whatever happens to the folder in between."""

import hashlib
import os
import pwd
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
from manifests import sections

import fastcar_compile as fc
from fastcar_compile.artifact import digest, opened
from fastcar_compile.artifact.digest import Digests, UserDigests
from fastcar_compile.artifact.layout import GRAPH_AFTER
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.errors import ArtifactError, InputError, UserError
from fastcar_compile.ir.tensor_files import save_tensors

WEIGHTS = "weights/model.safetensors"
VALUES = np.arange(1 << 17, dtype=np.float32)


def build(path: Path, factor: int = 1) -> Path:
    """An artifact with a large file of weights and a small graph."""
    with ArtifactWriter(path) as writer:
        writer.write_text(GRAPH_AFTER, '{"a": 1}')
        save_tensors(writer.file(WEIGHTS), {"w": VALUES * factor})
        writer.write_bytes("drs/table.bin", b"")
        writer.finish(sections())
    return path


def rewritten(path: Path) -> None:
    """Change the last byte, in place."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def exchanged(path: Path) -> None:
    """Put a changed copy in the file's place."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    rewritten(copy)
    copy.replace(path)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("change", [exchanged, Path.unlink, lambda path: shutil.rmtree(path.parents[1])])
def test_a_file_that_is_replaced_after_opening_is_not_read(tmp_path: Path, change: Callable[[Path], object]) -> None:
    with StoredArtifact(build(tmp_path / "out")) as artifact:
        for name in (WEIGHTS, GRAPH_AFTER):
            if (artifact.path / name).exists():
                change(artifact.path / name)
        np.testing.assert_array_equal(artifact.arrays()["w"], VALUES)
        assert artifact.json(GRAPH_AFTER) == {"a": 1}
        assert artifact.files.data(WEIGHTS).endswith(VALUES.tobytes())


@pytest.mark.parametrize("change", [rewritten, lambda path: os.truncate(path, 100)])
def test_a_large_file_that_is_written_after_opening_is_refused(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    with StoredArtifact(build(tmp_path / "out")) as artifact:
        change(artifact.path / WEIGHTS)
        change(artifact.path / GRAPH_AFTER)
        assert artifact.json(GRAPH_AFTER) == {"a": 1}
        for read in (artifact.arrays, lambda: artifact.files.data(WEIGHTS)):
            with pytest.raises(ArtifactError, match=r"model\.safetensors (was written since|cannot be read)"):
                read()


def test_a_large_file_is_read_once_where_a_caller_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "SETTLED_NS", 0)
    monkeypatch.setenv(digest.CACHE, str(tmp_path / "cache"))
    readings, real = list[int](), digest.blocks
    monkeypatch.setattr(digest, "blocks", lambda descriptor: readings.append(descriptor) or real(descriptor))
    path = build(tmp_path / "out")
    readings.clear()
    for reread in (False, False, True, True):
        fc.load(path, reread=reread).close()
    assert len(readings) == 3
    (tmp_path / "cache" / "digests.json").unlink()
    for change in (rewritten, exchanged):
        fc.load(path, reread=False).close()
        change(path / WEIGHTS)
        with pytest.raises(ArtifactError, match=r"model\.safetensors: changed"):
            fc.load(path, reread=False)
        rewritten(path / WEIGHTS)


def test_arrays_outlive_the_artifact_and_are_private(tmp_path: Path) -> None:
    with StoredArtifact(build(tmp_path / "out")) as artifact:
        first, second = artifact.arrays()["w"], artifact.arrays()["w"]
    first[:] = 0
    np.testing.assert_array_equal(second, VALUES)
    with StoredArtifact(tmp_path / "out"):
        pass


def test_a_closed_artifact_says_so(tmp_path: Path) -> None:
    artifact = StoredArtifact(build(tmp_path / "out"))
    artifact.close()
    artifact.close()
    for read in (artifact.arrays, lambda: artifact.json(GRAPH_AFTER)):
        with pytest.raises(InputError, match="the artifact is closed"):
            read()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    path = build(tmp_path / "out")
    before = descriptors()
    for _ in range(20):
        StoredArtifact(path).arrays()  # collected
        with StoredArtifact(path):
            pass
    rewritten(path / WEIGHTS)
    for _ in range(20):
        with pytest.raises(ArtifactError, match="changed"):
            StoredArtifact(path)
    assert descriptors() == before


def test_only_files_of_the_manifest_are_given(tmp_path: Path) -> None:
    with StoredArtifact(build(tmp_path / "out")) as artifact:
        assert artifact.files.data("drs/table.bin") == b""
        assert artifact.files.mapped("drs/table.bin").size == 0
        with pytest.raises(ArtifactError, match="at most 7 are read"):
            artifact.files.data(GRAPH_AFTER, most=7)
        for name in ("../out/" + GRAPH_AFTER, str(artifact.path / GRAPH_AFTER), "manifest.json", "none"):
            with pytest.raises(ArtifactError, match="is not a file of the artifact"):
                artifact.files.data(name)


def test_a_pipe_in_the_place_of_a_file_is_not_opened(tmp_path: Path) -> None:
    """test_store.py has links."""
    path = build(tmp_path / "out")
    (path / "drs" / "table.bin").unlink()
    os.mkfifo(path / "drs" / "table.bin")
    with pytest.raises(ArtifactError, match="not a plain file"):
        StoredArtifact(path)


def test_many_small_files_are_not_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "KEPT_BYTES", 4)
    before = descriptors()
    with StoredArtifact(build(tmp_path / "out")) as artifact:
        assert descriptors() == before + 3  # the folder, the weights and the graph
        rewritten(artifact.path / GRAPH_AFTER)
        with pytest.raises(ArtifactError, match="was written since"):
            artifact.json(GRAPH_AFTER)


# A file is read each time, unless the caller keeps digests; a changed file is read always.


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
