"""The artifact store: deterministic bytes, atomic replacement, and every kind of damage by its text."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from manifests import sections
from tensor_maps import load_tensors

from fastcar_compile.artifact.manifest import SCHEMA_VERSION
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import PipelineSection, Section
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.errors import ArtifactError, InternalError
from fastcar_compile.ir.tensor_files import save_tensors

TENSORS = {"b": np.arange(6).reshape(2, 3), "a": np.ones((2, 2), np.float32)}


def build(path: Path, text: str = "hello\n") -> Path:
    """A small artifact with three files."""
    with ArtifactWriter(path) as writer:
        writer.write_text("graph/after.txt", text)
        save_tensors(writer.file("weights/model.safetensors"), TENSORS)
        writer.write_bytes("drs/table.bin", bytes(range(16)))
        writer.finish(sections())
    return path


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_round_trip(tmp_path: Path) -> None:
    path = build(tmp_path / "out")
    manifest = StoredArtifact(path).manifest
    assert sorted(manifest.files) == ["drs/table.bin", "graph/after.txt", "weights/model.safetensors"]
    assert manifest.schema_version == SCHEMA_VERSION
    assert (manifest.options, manifest.layers) == (sections().options, sections().layers)
    assert manifest.files["drs/table.bin"].size == 16
    assert {"fastcar_compile", "torch", "tvm", "onnx", "python"} <= manifest.producer.keys()


def test_same_inputs_same_bytes_in_any_folder(tmp_path: Path) -> None:
    first, second = build(tmp_path / "one"), build(tmp_path / "deeper" / "two")
    assert snapshot(first) == snapshot(second)
    assert (first / "manifest.json").read_bytes().endswith(b"}\n")


def test_tensors_that_share_memory_or_are_views(tmp_path: Path) -> None:
    base = np.arange(12.0).reshape(3, 4)
    save_tensors(tmp_path / "t.safetensors", {"base": base, "same": base, "view": base.T})
    loaded = load_tensors(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(loaded["view"], base.T)
    np.testing.assert_array_equal(loaded["same"], base)


def test_broken_tensor_file(tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_bytes(b"\x80\x04not tensors")
    with pytest.raises(ArtifactError, match="the tensor file cannot be read"):
        load_tensors(tmp_path / "t.safetensors")
    with pytest.raises(ArtifactError, match="the tensor file cannot be read"):
        load_tensors(tmp_path / "none.safetensors")
    (tmp_path / "short.safetensors").write_bytes(
        (build(tmp_path / "o") / "weights/model.safetensors").read_bytes()[:-1]
    )
    with pytest.raises(ArtifactError, match=r"bytes \d+ to \d+ do not hold"):
        load_tensors(tmp_path / "short.safetensors")


def test_replaces_an_artifact(tmp_path: Path) -> None:
    path = build(tmp_path / "out", "old\n")
    build(path, "new\n")
    StoredArtifact(path).close()
    assert (path / "graph/after.txt").read_text() == "new\n"
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_may_be_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    build(tmp_path / "out")


@pytest.mark.parametrize("content", [None, "not json", "[]", '{"schema_version": 2, "producer": {}}'])
def test_refuses_a_foreign_folder_and_leaves_it_alone(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "home"
    path.mkdir()
    (path / "thesis.txt").write_text("mine")
    if content is not None:
        (path / "manifest.json").write_text(content)
    before = snapshot(path)
    with pytest.raises(ArtifactError, match="the output folder exists and is not a fastcar artifact"):
        build(path)
    assert snapshot(path) == before
    assert os.listdir(tmp_path) == ["home"]


def test_refuses_to_lose_files_that_stand_in_an_artifact(tmp_path: Path) -> None:
    path = build(tmp_path / "out")
    (path / "hls").mkdir()
    for name in ("engine.xclbin", "synthesis.log"):
        (path / "hls" / name).write_text("eight hours of work")
    before = snapshot(path)
    with pytest.raises(ArtifactError) as refusal:
        build(path, "new")
    text = "has files that do not belong to its artifact and would be lost: 'hls/engine.xclbin' and 1 more"
    assert text in str(refusal.value)
    assert snapshot(path) == before
    shutil.rmtree(path / "hls")
    build(path, "new")


def test_refuses_a_file_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(build(tmp_path / "real"))
    for name in ("file", "link"):
        with pytest.raises(ArtifactError, match="the output path exists and is not a folder"):
            build(tmp_path / name)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    def fail_in_the_middle(path: Path) -> None:
        with ArtifactWriter(path) as writer:
            writer.write_text("graph/after.txt", "half")
            raise error

    with pytest.raises(error):
        fail_in_the_middle(tmp_path / "a" / "b" / "out")
    assert os.listdir(tmp_path) == []
    path = build(tmp_path / "out", "old\n")
    before = snapshot(path)
    with pytest.raises(error):
        fail_in_the_middle(path)
    assert snapshot(path) == before
    assert os.listdir(tmp_path) == ["out"]


def absolute_path(writer: ArtifactWriter) -> None:
    writer.finish(sections(pipeline=PipelineSection(passes=str(writer.path), log=())))


def link(writer: ArtifactWriter) -> None:
    (writer.root / "link").symlink_to("/etc/passwd")
    writer.finish(sections())


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda writer: writer.write_text("a", "x"), "the artifact has no sections"),
        (absolute_path, "absolute path"),
        (link, "is a link"),
    ],
)
def test_a_defect_leaves_nothing(tmp_path: Path, work: Callable[[ArtifactWriter], object], text: str) -> None:
    with pytest.raises(InternalError, match=text), ArtifactWriter(tmp_path / "out") as writer:
        work(writer)
    assert os.listdir(tmp_path) == []


class Note(Section):
    """A section of another package."""

    text: str


def test_a_section_of_another_package(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out") as writer:
        writer.finish(sections(extensions={"note": Note(text="a").model_dump(mode="json")}))
    manifest = StoredArtifact(tmp_path / "out").manifest
    assert manifest.extension("note", Note) == Note(text="a")
    assert manifest.extension("other", Note) is None
    with pytest.raises(ArtifactError, match="section note has bad fields: passes: Field required"):
        manifest.extension("note", PipelineSection)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "", ".", "a\\b", "manifest.json"])
def test_writer_refuses_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InternalError), ArtifactWriter(tmp_path / "out") as writer:
        writer.write_text(name, "x")
    assert os.listdir(tmp_path) == []


def test_writer_outside_its_block(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="outside its with block"):
        ArtifactWriter(tmp_path / "out").write_text("a", "x")


def test_all_damage_is_reported_at_once(tmp_path: Path) -> None:
    path = build(tmp_path / "out")
    data = bytearray((path / "weights/model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "weights/model.safetensors").write_bytes(data)
    (path / "drs/table.bin").unlink()
    (path / "graph/after.txt").write_text("longer than before\n")
    (path / "extra.pkl").write_bytes(b"x")
    (path / "linked").symlink_to(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        StoredArtifact(path)
    message = str(caught.value)
    assert "the artifact is damaged, 5 files of it" in message
    assert "drs/table.bin: missing" in message
    assert "graph/after.txt: has 19 bytes, not 6" in message
    assert "weights/model.safetensors: changed: its SHA-256 is not the manifest's" in message
    assert "extra.pkl: unexpected, is not in the manifest" in message
    assert "linked: unexpected, is a symbolic link" in message


def test_a_linked_folder_is_not_followed(tmp_path: Path) -> None:
    path = build(tmp_path / "out")
    (path / "drs").rename(tmp_path / "drs")
    (path / "drs").symlink_to(tmp_path / "drs")
    with pytest.raises(ArtifactError) as caught:
        StoredArtifact(path)
    assert "drs/table.bin: is in drs, a symbolic link or no folder" in str(caught.value)
    assert "drs: unexpected, is a symbolic link" in str(caught.value)


def test_manifest_problems(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no artifact folder here"):
        StoredArtifact(tmp_path / "none")
    with pytest.raises(ArtifactError, match=r"the folder has no manifest\.json"):
        StoredArtifact(tmp_path)
