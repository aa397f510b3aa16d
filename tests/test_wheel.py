"""The installed package: its version, what the wheel holds, and what an installation without torch can do."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.artifact.manifest import producer_versions
from fastcar_compile.support import packages as version

ROOT = Path(__file__).parents[1]
FOLDERS = ("hls_templates", "fastcar_compile")
FALLBACK: str = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools_scm"][
    "fallback_version"
]


def built(source: Path, folder: Path, *options: str) -> Path:
    """The wheel that `python -m build` makes of a source tree; it goes over an sdist unless `options` say otherwise."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree without git: setuptools builds in it."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel, built from its sdist."""
    return built(source, tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_targets_templates_and_type_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    wanted = {p.relative_to(ROOT).as_posix() for p in sources if "__pycache__" not in p.parts}
    assert sorted(wanted - names) == []
    assert "fastcar_compile/py.typed" in names


def test_the_plug_in_holds_its_page_and_its_command(tmp_path: Path) -> None:
    plug_in = shutil.copytree(ROOT / "play", tmp_path / "play", ignore=shutil.ignore_patterns("__pycache__"))
    with zipfile.ZipFile(built(plug_in, tmp_path)) as wheel:
        names = set(wheel.namelist())
        points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    wanted = {p.relative_to(plug_in).as_posix() for p in (plug_in / "fastcar_play").rglob("*") if p.is_file()}
    assert sorted(wanted - names) == []
    assert points == "[fastcar_compile.commands]\nplay = fastcar_play.command:play_command\n"
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a virtual environment with the package and its base dependencies, from the package index."""
    folder = tmp_path_factory.mktemp("device") / "venv"
    venv.create(folder)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
    command = [*uv, "--python", str(folder / "bin" / "python"), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """A finished process that sees only what its virtual environment holds."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_a_device_without_torch_decodes_the_same_tokens(device: Path, artifact: fc.Artifact) -> None:
    done = run(device / "fastcar", "run", artifact.path, "--prompt", "1,2,3", "--num-tokens", 20, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    session = artifact.session("cpu")
    assert report["tokens"] == session.generate(np.array([[1, 2, 3]]), 20).tolist()
    assert report["replay_ratio"] == session.stats.replay_ratio > 0
    assert run(device / "fastcar", "--version").stdout == f"fastcar {FALLBACK}\n"
    absent = run(device / "python", "-c", "import torch")
    assert "No module named 'torch'" in absent.stderr


MISSING = {
    "fc.compile('.')": "compile", "fc.train_gate": "train", "fc.load(path).graph": "compile",
    "fc.load(path).session('eager')": "compile", "fc.load(path).session('onnxruntime')": "onnxruntime",
}  # fmt: skip
"""What a device without extras cannot do -> the extra."""
TRIED = """
import sys, fastcar_compile as fc
*tried, path = sys.argv[1:]
for code in tried:
    try:
        eval(code)
    except fc.BackendError as error:
        print(str(error).replace("\\n", " "))
"""


def test_what_is_missing_is_named(device: Path, artifact: fc.Artifact) -> None:
    done = run(device / "python", "-c", TRIED, *MISSING, artifact.path)
    assert done.returncode == 0, done.stderr
    for line, extra in zip(done.stdout.splitlines(), MISSING.values(), strict=True):
        assert line.startswith("the package")
        assert f'pip install "fastcar_compile[{extra}]"' in line


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """In bfloat16, which numpy does not have."""
    folder, replay = tmp_path_factory.mktemp("artifact") / "artifact", fc.ReplayConfig(threshold=-100.0)
    return fc.compile(
        llama(), target="cpu", tokens_per_frame=8, replay=replay, quant="bf16", output=folder, prefill_chunk=1
    )


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
