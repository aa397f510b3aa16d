"""The controller on damaged tables under the address and undefined-behaviour sanitizers."""

import subprocess
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from drs.tables import LIMITS, table_for
from fastcar_compile.codegen.hls.control_table.builder import GateScore
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, Status
from fastcar_compile.codegen.hls.project import emit_drs
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.runtime.backends.hls_csim import ap_types_folder, compiler

ROUNDS = 20_000
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


GATES = {
    "tas": GateScore(heads=(None, ((0, 0.5), (3, -2.0)), None)),
    "input_delta": GateScore(GateKind.INPUT_DELTA, 10),
}
"""Two sets of loops: over heads with and without weights; over the input."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("gate", GATES)
def test_damaged_tables_end_within_their_buffers(gate: str, csim_tools: None, tmp_path: Path) -> None:
    table = table_for(6, couple_cfg=True, attention=AttentionShape(4, 2, 6), gate=GATES[gate])
    (tmp_path / "table.bin").write_bytes(table.to_bytes())
    for name, text in emit_drs(table, replace(LIMITS, gate=table.gate)).items():
        (tmp_path / name).write_text(text)
    sources = [tmp_path / "fastcar_drs.cpp", Path(__file__).with_name("fuzz.cpp")]
    include = [f"-I{tmp_path}", f"-I{files('hls_templates')}", "-isystem", str(ap_types_folder())]
    command = [compiler(), "-std=c++14", *SANITIZE, *WARNINGS, *include, *map(str, sources), "-o", "fuzz"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    program = [tmp_path / "fuzz", tmp_path / "table.bin", str(ROUNDS)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(zip(Status, map(int, done.stdout.split()), strict=True))
    assert sum(counts.values()) == 2 * ROUNDS
    assert counts.pop(Status.BAD_INSTRUCTION) == 0, "the controller has no instructions"
    assert not [status.name for status, count in counts.items() if count < 20], counts
