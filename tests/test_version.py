"""The version comes from git's tags, and holds nothing that differs between two clones of a commit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version
from test_wheel import FALLBACK

import fastcar_compile as fc
from fastcar_compile.artifact.manifest import producer_versions
from fastcar_compile.support import packages as version

ROOT = Path(__file__).parents[1]


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def version_of(folder: Path) -> str:
    """What setuptools-scm finds with this project's settings."""
    command = [sys.executable, "-m", "setuptools_scm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with two commits and no tag."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    for text in ("first", "second"):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", text)
    return tmp_path


def test_versions_of_a_clone(clone: Path) -> None:
    """Without tags, at a tag, after it with changes: no hash, no date, and the release is the tag's."""
    assert Version(version_of(clone)).base_version == FALLBACK
    git(clone, "tag", "v7.1.0")
    assert version_of(clone) == "7.1.0"
    git(clone, "commit", "-q", "--allow-empty", "-m", "third")
    (clone / "pyproject.toml").write_text((clone / "pyproject.toml").read_text() + "\n# changed\n")
    assert version_of(clone) == "7.1.0.post1.dev1"


@pytest.mark.parametrize("installed", ["7.1.0", "7.1.0.post1.dev12"])
def test_an_artifact_names_the_release(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed_version", lambda: installed)
    assert producer_versions()["fastcar_compile"] == "7.1.0"


def test_a_tree_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    assert fc.__version__ == metadata.version("fastcar_compile")
    monkeypatch.setattr(metadata, "version", missing)
    assert fc.__version__ == version.UNKNOWN


def test_the_changelog_begins_with_what_is_next() -> None:
    """Then the newest release, which is the version of a tree without tags."""
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", FALLBACK]
