"""One builder per folder, what killed builders leave, and the folder after a kill at every step."""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import fresh_process
from manifests import sections

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.writer import ArtifactWriter, store_thresholds
from fastcar_compile.errors import ArtifactError
from faults.crash_points import build, content

MEMORY = Path("/dev/shm")
"""Where a file is written through to the disk at once, since there is none."""


@pytest.fixture(scope="module")
def crashes() -> dict[str, list[dict[str, Any]]]:
    """What was found after a kill at each step, by scenario."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        return json.loads(fresh_process(Path(__file__).with_name("crash_points.py"), folder))


@pytest.mark.parametrize(
    ("scenario", "texts"), [("new", {"", "new"}), ("replaced", {"", "old", "new"}), ("thresholds", {"old"})]
)
def test_a_kill_at_any_step_loses_nothing(
    crashes: dict[str, list[dict[str, Any]]], scenario: str, texts: set[str]
) -> None:
    found = crashes[scenario]
    assert {each["content"] for each in found} == texts
    assert {each["after"] for each in found} == {"next"}
    assert {tuple(each["left"]) for each in found} == {("out",)}


def test_a_kill_between_two_renames_is_told_with_the_command_that_undoes_it(
    crashes: dict[str, list[dict[str, Any]]],
) -> None:
    (between,) = (each for each in crashes["replaced"] if not each["content"])
    assert between["event"] == "os.rename artifact"
    assert "a build is replacing this artifact, or was killed while it did" in between["refused"]
    pattern = r"the next build into it puts it back, and so does `mv \S+/\.out\.building-\w{8}/old \S+/out`"
    assert re.search(pattern, between["refused"])


def test_the_command_of_the_hint_puts_the_artifact_back(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    (tmp_path / ".out.building-01234567").mkdir()
    (tmp_path / "out").rename(tmp_path / ".out.building-01234567" / "old")
    with pytest.raises(ArtifactError) as caught:
        StoredArtifact(tmp_path / "out")
    subprocess.run(str(caught.value).split("`")[1].split(), check=True)
    assert content(tmp_path / "out") == ("old", "")


def test_a_second_build_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out"
    build(path, "old")
    manifest = StoredArtifact(path).manifest
    text = "another build is writing this folder"
    with ArtifactWriter(path) as writer:
        with pytest.raises(ArtifactError, match=text):
            build(path, "new")
        with pytest.raises(ArtifactError, match=text):
            store_thresholds(path, manifest, None)
        build(tmp_path / "other", "beside it")
        writer.write_text("graph/after.txt", "first")
        writer.finish(sections())
    assert content(path) == ("first", "")
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    for name in (".out.building-01234567", ".out.building-abcdefgh"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "file").write_text("x")
    theirs = [".out.building-notes", ".out.building-abcdefghi", ".other.building-01234567", "out.building-01234567"]
    for name in theirs:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.building-11111111").symlink_to(tmp_path / ".out.building-notes")
    (tmp_path / ".out.building-76543210").write_text("a file where a build has a folder")
    theirs += [".out.building-11111111", ".out.building-76543210"]
    build(tmp_path / "out", "new")
    assert sorted(os.listdir(tmp_path)) == sorted(["out", *theirs])


def test_a_failed_rename_keeps_the_old_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "out", "old")
    real = os.rename

    def refuse(source: Path, destination: Path) -> None:
        if Path(source).name == "artifact":
            raise OSError(5, "Input/output error", str(source))
        real(source, destination)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ArtifactError, match="the output folder cannot be written: Input/output error"):
        build(tmp_path / "out", "new")
    monkeypatch.undo()
    assert content(tmp_path / "out") == ("old", "")
    assert os.listdir(tmp_path) == ["out"]
