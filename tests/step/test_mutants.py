"""Faults in the emitted headers, one at a time: each compiles, and the test bench of the kernel finds each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from conftest import Precompiled, first_often
from hls.library import DESIGNS
from hls.test_project import fast_build, run

from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.project import emit_hls
from step.test_step import DECODERS


@dataclass(frozen=True)
class Mutant:
    """A header with `wrong` where `right` stands once.

    Args:
        design: name of a decoder of whole steps, or of a design of short programs.
    """

    name: str
    header: str
    right: str
    wrong: str
    design: str = "tas, normed"


LEARNED, INT8, THREE = "learned", "tas", "input_delta, 3 of 1"

FIRST = Mutant("rounding", "numerics", "rest > 0.5f", "rest > 0.75f", "linears_int4")

OTHERS = [
    Mutant("threshold", "tas_core", "scores[row] >= threshold", "scores[row] > threshold"),
    Mutant("entry", "step_control", ".opcode == OP_END);", ".opcode == OP_MLP);", "linears_int4"),
    Mutant(
        "order of scales",
        "numerics",
        "static_cast<float>(accumulator) * scale;",
        "static_cast<float>(accumulator) * row_scale * channel_scale + 0.0f * scale;",
        INT8,
    ),
    Mutant("mapping", "mapping", "computes ? core : 0;\n        pass_of", "0 * core;\n        pass_of", THREE),
    Mutant("rotation", "row_core", "first_half ? straight - crossed", "first_half ? straight + crossed"),
    Mutant("low limb", "attention_core", "static_cast<int8_t>(mantissa & ((1 << LIMB_BITS) - 1))", "int8_t(0)"),
    Mutant("window", "step_control", "kept < window ? kept : window;", "kept < window ? kept : window - 1;"),
    Mutant("ring", "step_control", "(position - sinks) % ring;", "(position - sinks) % (ring + 1);"),
    Mutant("score", "tas_core", "sum + (low + high)", "sum + (low - high)"),
    Mutant("network", "gate_core", "return sum + total", "return sum - total", LEARNED),
    Mutant("pairs", "tas_core", "replay & (replay >> half) &", "(replay | (replay >> half)) &"),
    Mutant(
        "kept x",
        "step_rows",
        "row_computes(computing & list.deciding, b)",
        "row_computes(computing | list.deciding, b)",
        THREE,
    ),
    Mutant("commit", "step_control", "(list.before[b] - 1) % slots", "list.before[b] % slots", "tas, 2 of 2"),
    Mutant("CRC", "drs", "if (~crc != header[F_CRC])", "if (~crc != header[F_CRC] && count == 0)"),
]


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`project(design)`: the folder of a project without a fault, emitted once."""

    @cache
    def emitted(name: str) -> Path:
        folder = tmp_path_factory.mktemp("project")
        made = DECODERS.get(name)
        if made is None:
            emit_hls(DESIGNS[name], folder)
        else:
            emit_hls(made.made, folder, made.table, step=StepDesign.of(made.program, 2))
        return folder

    return emitted


@pytest.mark.parametrize("mutant", first_often([FIRST, *OTHERS]), ids=lambda own: own.name)
def test_a_bench_finds_it(
    csim_tools: None,
    require_tool: Callable[[str], str],
    precompiled: Precompiled,
    project: Callable[[str], Path],
    mutant: Mutant,
    tmp_path: Path,
) -> None:
    """It compiles without a warning, and its bench says FAIL."""
    require_tool("make")
    header = f"fastcar_{mutant.header}.hpp"
    for source in filter(Path.is_file, project(mutant.design).iterdir()):
        text = source.read_text()
        if source.name == header:
            assert text.count(mutant.right) == 1
            text = text.replace(mutant.right, mutant.wrong)
        (tmp_path / source.name).write_text(text)
    built = run("make", "build/step_testbench", *fast_build(tmp_path, "g++", precompiled), cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    done = run("build/step_testbench", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "FAIL: " in done.stdout
