"""Same inputs, same bytes: two builds in two processes, into two folders, in surroundings that differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BUILD = """
import sys, fastcar_compile as fc
from decoders import llama
fc.compile(llama(), "zcu102", tokens_per_frame=8, output=sys.argv[1])
"""

SURROUNDINGS = (
    (0o022, {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "UTC"}),
    (0o077, {"PYTHONHASHSEED": "4242", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"}),
)


def test_two_builds_are_equal_byte_for_byte(tmp_path: Path) -> None:
    outputs = [tmp_path / "first", tmp_path / "deeper" / "second"]
    for output, (umask, variables) in zip(outputs, SURROUNDINGS, strict=True):
        command = [sys.executable, "-c", BUILD, str(output)]
        env = os.environ | variables
        subprocess.run(command, check=True, cwd=Path(__file__).parent, capture_output=True, env=env, umask=umask)
    first, second = ({f.relative_to(o).as_posix(): f for f in o.rglob("*") if f.is_file()} for o in outputs)
    assert first.keys() == second.keys()
    different = [name for name in first if first[name].read_bytes() != second[name].read_bytes()]
    assert different == []
    local = (str(tmp_path).encode(), str(Path(__file__).parents[1]).encode())
    assert [n for n, f in first.items() if any(text in f.read_bytes() for text in local)] == []
