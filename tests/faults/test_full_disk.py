"""What a build says and leaves where it cannot write: full disks, no inodes, read-only places, names too long."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import fresh_process, missing
from manifests import sections

from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.errors import ArtifactError
from faults.crash_points import build

NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was found on file systems of memory, by scenario."""
    base = tmp_path_factory.mktemp("disks")
    try:
        mounted = ["sh", "-c", 'mount -t tmpfs tmpfs "$0"', str(base)]
        subprocess.run([*NAMESPACE, *mounted], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        missing("a mount in a namespace of its own (unshare --mount, mount -t tmpfs) is not allowed here")
    return json.loads(fresh_process(Path(__file__).with_name("full_disk.py"), base, inside=NAMESPACE))


def test_a_full_disk_keeps_the_old_artifact(found: dict[str, Any]) -> None:
    *full, room = found["disk"]
    text = "the output folder cannot be written: No space left on device (0 bytes are free)"
    assert {each["error"].split("\n")[0] for each in full} == {text}
    assert {(each["content"], *each["left"]) for each in full} == {("small", "ballast", "out")}
    assert room == {"error": "", "content": "large", "left": ["out"]}


def test_no_inode_is_an_error_of_its_own(found: dict[str, Any]) -> None:
    (each,) = found["inodes"]
    assert "No space left on device (no inode is free)" in each["error"]
    assert (each["content"], each["left"][-1], len(each["left"])) == ("small", "out", 9)


def test_a_read_only_place(found: dict[str, Any]) -> None:
    (each,) = found["read-only"]
    assert each["error"].startswith("the output folder cannot be written: Read-only file system\n")
    assert (each["content"], each["left"]) == ("small", ["out"])


def test_a_mount_point_is_refused(found: dict[str, Any]) -> None:
    (each,) = found["mount"]
    assert "the output folder is a mount point, which no rename can replace" in each["error"]


def test_linkers_that_fail(found: dict[str, Any]) -> None:
    scratch, library, broken, missing_one = found["linkers"]
    assert scratch.startswith("[Errno 28] No space left on device")
    assert library == "[Errno 28] No space left on device: '/linkers/a.so'"
    assert broken.startswith("/broken-g++ could not link a.so (exit code 3):\nno such option")
    assert missing_one.startswith("no-such-g++ cannot be run: No such file or directory\n  hint:")


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    for length in (300, 255, 240):
        with pytest.raises(ArtifactError, match="cannot be written: File name too long"):
            build(tmp_path / ("n" * length), "text")
    assert os.listdir(tmp_path) == []


def test_a_file_system_that_makes_no_files() -> None:
    with pytest.raises(ArtifactError, match="cannot be written: No such file or directory"):
        build(Path("/proc/out"), "text")


def test_room_is_checked_before_the_work(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out") as writer:
        writer.finish(sections())
        writer.require_room(0)
        with pytest.raises(ArtifactError, match=r"needs at least 1,000,000,000,000 bytes more, and [0-9,]+ are free"):
            writer.require_room(10**12)


def test_an_error_about_another_file_is_not_the_output_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), ArtifactWriter(tmp_path / "out"):
        (tmp_path / "model").read_bytes()
