"""The installed package: built as a wheel, it holds everything that the compiler reads at run time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("hls_templates", "fastcar_compile")


def test_wheel_holds_targets_templates_and_type_marker(tmp_path: Path) -> None:
    copy = tmp_path / "source"  # setuptools builds in the source tree
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(copy),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    wanted = {p.relative_to(ROOT).as_posix() for p in sources if "__pycache__" not in p.parts}
    assert sorted(wanted - names) == []
    assert "fastcar_compile/py.typed" in names
