"""Every command of README.md and the tutorial, run in order against the shipped example."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastcar_compile.cli import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh|python)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"\n\n```\n(.*?)\n```", re.DOTALL)
"""What the README says that its commands print."""
SMALLER = {
    "hidden_size=256, intermediate_size=1024": "hidden_size=64, intermediate_size=128",
    "num_hidden_layers=4": "num_hidden_layers=2",
    "repeat(1, 6)": "repeat(1, 3)", "64], 320)": "64], 128)", 'quant="w8a8", ': 'quant="w8a8", prefill_chunk=4, ',
}  # fmt: skip
"""What the README's own decoder becomes, so that the same calls take less; `make thorough` has it as it is."""
NOT_RUN = {"README.md": ["on a fresh machine"], "docs/tutorial/index.md": ["once", "some minutes", "hours"]}
"""Titles of the blocks that a test cannot run. A new one is listed here, so that nobody hides a command by a title."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its title (empty: the block runs) and its text."""

    language: str
    title: str
    text: str


def blocks(document: str) -> list[Block]:
    """Return the fenced sh and python blocks of a document, in order."""
    return [Block(*found) for found in BLOCK.findall((ROOT / document).read_text("utf-8"))]


def script(document: str) -> str:
    """Return a shell script of all blocks that run. A python block begins with the imports of those before it."""
    lines, earlier = ["set -eu"], ""
    for number, block in enumerate(b for b in blocks(document) if not b.title):
        lines.append(f"echo '== block {number} of {document}' >&2")
        if block.language == "sh":
            lines.append(block.text)
        else:
            imports = "\n".join(line for line in earlier.splitlines() if re.match(r"(import|from) ", line))
            lines.append(f"{sys.executable} - <<'END'\n{imports}\n{block.text}END\n")
            earlier += block.text
    return "\n".join(lines)


@pytest.mark.parametrize("document", sorted(NOT_RUN))
def test_only_listed_blocks_are_not_run(document: str) -> None:
    found = blocks(document)
    assert [b.title for b in found if b.title] == NOT_RUN[document]
    assert {b.language for b in found if not b.title} == {"sh", "python"}


def check_output(printed: str) -> None:
    """The README shows words that its commands print; figures may differ by machine."""
    (shown,) = SHOWN.findall((ROOT / "README.md").read_text("utf-8"))
    for line in shown.splitlines():
        pattern = re.sub(r"(\\\.|\d)+", r"[\\d.]+", re.escape(line))
        assert re.search(f"^{pattern}$", printed, re.MULTILINE), line
    assert re.search(r"^over dense +1\.[1-9]", printed, re.MULTILINE), "the gain of replay"


def test_every_command_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported what each of the commands would import again."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names, printed = dict[str, object](), ""
    for block in (b for b in blocks("README.md") if not b.title):
        if block.language == "python":
            text = block.text
            for part, less in SMALLER.items():
                assert part in text
                text = text.replace(part, less)
            exec(text, names)
            continue
        for line in block.text.splitlines():
            (program, *words), _, otherwise = map(shlex.split, line.partition("#")[0].partition("||"))
            assert program == "fastcar"
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0 or otherwise == ["true"], done.output
            printed += done.stdout
    check_output(capsys.readouterr().out + printed)


@pytest.mark.thorough
@pytest.mark.parametrize("document", sorted(NOT_RUN))
def test_every_command_runs(
    document: str, tmp_path: Path, require_tool: Callable[[str], str], require_module: Callable[[str], None]
) -> None:
    require_tool("g++")
    require_module("hls4ml")  # its headers, for the C simulation
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script(document)], cwd=tmp_path, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if document == "README.md":
        check_output(done.stdout)
