"""Folders for scratch files: what killed processes left is removed, what living ones use is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastcar_compile import undo
from fastcar_compile.undo import scratch_folder

KILLED = """
import os, signal, sys
from fastcar_compile.undo import scratch_folder
with scratch_folder(sys.argv[1]) as folder:
    (folder / "half.so").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode < 0
    (left,) = tmp_path.iterdir()
    assert (left / "half.so").exists()
    with scratch_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert not list(tmp_path.iterdir())


def test_folders_in_use_and_of_others_stay(tmp_path: Path) -> None:
    others = {"fastcar-notes", "fastcar-abcdefghi", "other-abcdefgh", "fastcar-01234567", "fastcar-abcdefgh"}
    for name in others - {"fastcar-01234567", "fastcar-abcdefgh"}:
        (tmp_path / name).mkdir()
    (tmp_path / "fastcar-01234567").write_text("a file")
    (tmp_path / "fastcar-abcdefgh").symlink_to(tmp_path / "fastcar-notes")
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        assert {first.name, second.name} | others == set(os.listdir(tmp_path))
    assert set(os.listdir(tmp_path)) == others


def test_a_folder_that_another_process_took_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making a folder and locking it, a second process takes it for a leftover."""
    opened, made = undo._open, []

    def open_late(folder: str | Path) -> int:
        made.append(Path(folder))
        if len(made) == 1:
            Path(folder).rmdir()
        descriptor = opened(folder)
        if len(made) == 2:
            Path(folder).rmdir()
        return descriptor

    monkeypatch.setattr(undo, "_open", open_late)
    with scratch_folder(tmp_path) as folder:
        assert [path == folder for path in made] == [False, False, True]
        assert folder.is_dir()
