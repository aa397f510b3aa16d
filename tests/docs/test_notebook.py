"""The cells of examples/notebook.ipynb, run in order in a folder of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import check_module, check_tool

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CELLS = [c for c in json.loads((EXAMPLES / "notebook.ipynb").read_text("utf-8"))["cells"] if c["cell_type"] == "code"]


def test_it_has_no_outputs() -> None:
    assert [(cell["outputs"], cell["execution_count"]) for cell in CELLS] == [([], None)] * len(CELLS)


@pytest.mark.thorough  # `make demo` and the README's commands show the same calls
def test_its_cells_run(tmp_path: Path) -> None:
    check_tool("g++")
    check_module("PIL")
    (tmp_path / "moving_shapes").symlink_to(EXAMPLES / "moving_shapes")
    checks = "assert rows['replay'].shape == (6, 32, 32)\nassert session.stats.eligible_replay_ratio > 0.5"
    script = "\n".join([*("".join(cell["source"]) for cell in CELLS), checks])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "replay 8" in done.stdout
    assert "inserted gate learned" in done.stdout
    assert "return (" in done.stdout
    assert (tmp_path / "build" / "notebook" / "page.html").stat().st_size > 100_000
    assert done.stderr == ""
