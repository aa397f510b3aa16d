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
README = (ROOT / "README.md").read_text("utf-8")


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


def _at_most_five_per_cent(quality: str) -> tuple[float, float]:
    """Return the least agreement in per cent, and the largest loss of PSNR in dB, of the rows of at most 1.05x."""
    columns = r"([\d.]+)x \| ([\d.]+) % \| ([\d.]+) dB \| "
    found, dense = list[tuple[float, float]](), 0.0
    for gate, loss, agreement, psnr in re.findall(rf"^\| \S+ \| (\S+) \|.* \| {columns}", quality, re.MULTILINE):
        dense = float(psnr) if gate == "dense" else dense
        if float(loss) <= 1.05:
            found.append((float(agreement), dense - float(psnr)))
    assert len(found) > 10
    return min(agreement for agreement, _ in found), max(loss for _, loss in found)


def test_the_readme_is_short_and_its_figures_are_the_measured_ones() -> None:
    assert len(README.splitlines()) <= 90
    quality = (ROOT / "docs" / "measurements" / "quality.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (\w+), (as trained|fine-tuned \w+ \w+) \| `(\w+)`.* \| ([\d.]+ %) \| ([\d.]+x) \|$", README, re.M
    )
    assert len(rows) == 5
    least, most = _at_most_five_per_cent(quality)
    for decoder, how, gate, replay, loss in rows:
        name = decoder if how == "as trained" else f"{decoder}/tuned"
        measured = rf"^\| {name} \| `{gate}` \| \d+ % \| {replay} \| [\d.]+ \| {loss} \|"
        assert re.search(measured, quality, re.MULTILINE), (name, gate, replay, loss)
    assert f"at {least:.1f} % of the places or more, and PSNR falls by at most {most:.1f} dB" in README
    speed = (ROOT / "docs" / "measurements" / "speed.md").read_text("utf-8")
    names = {"float32": "float32", "bfloat16": "bfloat16", "int8": "w8a8", "int4": "w4a8"}
    found = re.findall(r"^\| (\w+) \| ([\d.]+x) \| ([\d.]+x) \|$", README, re.MULTILINE)
    assert [name for name, _, _ in found] == list(names)
    for name, dense, replay in found:
        assert f"- {names[name]}, dense: {dense} the fastest peer" in speed
        measured = rf"^\| fastcar_compile \| {names[name]} \| 0.8 \|.* \| context 512 of 1024; \w+ KV \| {replay} \|$"
        assert re.search(measured, speed, re.MULTILINE)


def test_the_citation_is_of_the_paper_that_the_readme_names(require_module: Callable[[str], None]) -> None:
    require_module("yaml")
    import yaml

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys(), "what the format requires"
    (paper,) = cited["references"]
    assert "FastCar (arXiv " + paper["doi"].removeprefix("10.48550/arXiv.") in README
    assert len(paper["authors"]) == 14
