"""The documentation site builds without a warning, holds every public name, and loads nothing from other hosts."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fastcar_compile
from fastcar_compile.artifact.manifest import CHECKSUM, Manifest
from fastcar_compile.cli.commands import COMMANDS
from fastcar_compile.cli.common import ExitCode

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(require_module: Callable[[str], None], tmp_path: Path) -> Path:
    """Return the folder of the built site."""
    for name in ("mkdocs", "material", "mkdocstrings_handlers"):
        require_module(name)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")], cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return tmp_path / "site"


def test_the_site_builds_without_a_warning(site: Path) -> None:
    api = (site / "reference" / "python_api" / "index.html").read_text("utf-8")
    assert [n for n in fastcar_compile.__all__ if f'id="fastcar_compile.{n}"' not in api] == []
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", page.read_text("utf-8"))
        assert loaded == [], page


def test_links_of_the_files_beside_the_site_lead_somewhere() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("examples/*/README.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text("utf-8")):
            assert target.startswith("https://") or (path.parent / target).exists(), f"{path.name}: {target}"


def test_commands_and_exit_codes_are_those_of_the_program() -> None:
    text = (ROOT / "docs" / "reference" / "command_line.md").read_text("utf-8")
    commands, codes, _ = text.split("\n## ", 2)
    assert set(COMMANDS) <= set(re.findall(r"^\| `fastcar ([\w-]+)", commands, re.MULTILINE))
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", codes, re.MULTILINE)] == [c.value for c in ExitCode]


def test_the_manifest_has_the_documented_sections() -> None:
    text = (ROOT / "docs" / "reference" / "artifact.md").read_text("utf-8").split("\n## ")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == {CHECKSUM, *Manifest.model_fields}


def test_the_files_of_an_extension_exist() -> None:
    text = (ROOT / "docs" / "extending.md").read_text("utf-8")
    named = re.findall(r"`((?:fastcar_compile|hls_templates|tests)/[^`]*)`", text)
    assert len(named) > 20
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []
