"""Same inputs, same bytes: two builds in two processes, into two folders."""

import os
import subprocess
import sys
from pathlib import Path

import fastcar_compile as fc

TESTS = Path(__file__).parents[1]
BUILD = """
import sys
from pathlib import Path
import numpy as np
import fastcar_compile as fc
fc.load(sys.argv[2]).session("cpu").generate(np.zeros((2, 1), np.int64), 3)  # a library is loaded before the compiler
from board.conftest import compiled_board
compiled_board(Path(sys.argv[1]))
"""


def test_two_builds_are_equal_byte_for_byte(artifact: fc.Artifact, tmp_path: Path) -> None:
    """The second one in a fresh process of another hash seed, time zone, locale and umask, which has decoded before."""
    first, second = artifact.path, tmp_path / "deeper" / "second"
    other = {"PYTHONHASHSEED": "7", "TZ": "Asia/Kolkata", "LC_ALL": "C", "PYTHONPATH": f"{TESTS.parent}"}
    command = [sys.executable, "-c", BUILD, str(second), str(first)]
    done = subprocess.run(command, cwd=TESTS, env=os.environ | other, umask=0o077, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files, again = ({f.relative_to(o).as_posix(): f for f in o.rglob("*") if f.is_file()} for o in (first, second))
    assert files.keys() == again.keys()
    assert [name for name in files if files[name].read_bytes() != again[name].read_bytes()] == []
    local = [str(path).encode() for path in (first.parent, tmp_path, TESTS.parent)]
    assert [n for n, f in files.items() if any(text in f.read_bytes() for text in local)] == []
