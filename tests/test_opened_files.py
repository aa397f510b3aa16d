"""What a caller gets of an artifact is what was checked, whatever happens to the folder in between."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from manifests import sections

import fastcar_compile as fc
from fastcar_compile.artifact import digest, opened
from fastcar_compile.artifact.layout import GRAPH_AFTER
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.errors import ArtifactError, InputError
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


def test_a_folder_in_the_place_of_the_artifact_is_not_read(tmp_path: Path) -> None:
    with StoredArtifact(build(tmp_path / "out")) as artifact:
        build(tmp_path / "out", factor=2)
        np.testing.assert_array_equal(artifact.arrays()["w"], VALUES)
    with StoredArtifact(tmp_path / "out") as artifact:
        np.testing.assert_array_equal(artifact.arrays()["w"], VALUES * 2)


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


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "deep"])
def test_what_is_no_plain_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = build(tmp_path / "out")
    table = path / "drs" / "table.bin"
    table.unlink()
    if kind == "fifo":
        os.mkfifo(table)
    elif kind == "folder":
        table.mkdir()
    elif kind == "link":
        table.symlink_to(path / GRAPH_AFTER)
    else:
        table.write_bytes(b"")
        (path / "/".join(["d" * 50] * 12)).mkdir(parents=True)
    with pytest.raises(ArtifactError, match=r"not a plain file|d{50}: unexpected"):
        StoredArtifact(path)


def test_many_small_files_are_not_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "KEPT_BYTES", 4)
    before = descriptors()
    with StoredArtifact(build(tmp_path / "out")) as artifact:
        assert descriptors() == before + 3  # the folder, the weights and the graph
        rewritten(artifact.path / GRAPH_AFTER)
        with pytest.raises(ArtifactError, match="was written since"):
            artifact.json(GRAPH_AFTER)
