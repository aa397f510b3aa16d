"""The test bench of a kernel of whole steps, as a user runs it with make."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Precompiled
from hls.test_project import SANITIZED, fast_build, run

from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import kernel_interface
from fastcar_compile.codegen.hls.project import bench_inputs, emit_hls, step_bench
from fastcar_compile.codegen.hls.step_golden import Golden
from fastcar_compile.codegen.hls.step_program.instructions import Attend
from fastcar_compile.codegen.hls.step_program.program import read_program
from fastcar_compile.codegen.hls.step_program.replaying import Decide, Replay
from fastcar_compile.codegen.hls.step_sample import sample_program
from fastcar_compile.config.targets import load_target
from step.test_step import DECODERS

MADE = DECODERS["tas, normed"]
STEP = StepDesign.of(MADE.program, 2)


@pytest.mark.parametrize("name", DECODERS)
def test_the_sample_is_one_gated_layer_on_a_small_memory(name: str) -> None:
    """Every reach lies within its sizes; of the rows that are free to replay some do, and others compute."""
    made = DECODERS[name]
    sample = sample_program(made.program, made.made)
    golden = Golden(sample, made.made, made.table)
    assert all(instruction.fits(sample.sizes) for instruction in sample.instructions)
    assert read_program(sample.to_bytes(golden.table)) == sample
    assert [sum(isinstance(i, kind) for i in sample.instructions) for kind in (Attend, Decide, Replay)] == [1, 1, 1]
    assert 2 * sample.sizes.key_words == made.program.sizes.key_words
    assert made.program.sizes.weight_words // 2 - 200 < sample.sizes.weight_words < made.program.sizes.weight_words
    assert {replays for _, replays, _ in golden.free} == {True, False}


def test_thresholds_do_not_decide_the_bench() -> None:
    """A build with others takes the bench of an earlier one; a build with another rule does not."""
    kernel, table = kernel_interface(MADE.made, STEP, MADE.table), MADE.table
    others = table.with_thresholds([5.0] * table.layers)
    for function in (bench_inputs, step_bench):
        assert function(MADE.made, STEP, others, kernel) == function(MADE.made, STEP, table, kernel)
    assert bench_inputs(MADE.made, STEP, replace(table, max_chain=3), kernel) != bench_inputs(
        MADE.made, STEP, table, kernel
    )


def test_the_project_is_whole(tmp_path: Path) -> None:
    """Caches are linked where the weights are, and co-simulation maps what the bench has."""
    emit_hls(MADE.made, tmp_path, MADE.table, load_target("zcu102"), STEP)
    link = (tmp_path / "link.cfg").read_text()
    assert re.search(r"sp=fastcar_step_1\.weights_0:(\w+)\nsp=[^\n]*\nsp=fastcar_step_1\.cache_0:\1\n", link)
    sample = sample_program(MADE.program, MADE.made).sizes
    top, weights = (tmp_path / "fastcar_step.cpp").read_text(), kernel_interface(MADE.made, STEP, MADE.table).ports[0]
    assert weights.depth == MADE.program.sizes.weight_words
    assert re.search(rf"port=weights_0 bundle=gmem_w0 offset=slave depth={sample.weight_words} ", top)


def test_the_bench_passes(
    csim_tools: None, require_tool: Callable[[str], str], precompiled: Precompiled, tmp_path: Path
) -> None:
    """Under AddressSanitizer and UBSan."""
    require_tool("make")
    emit_hls(MADE.made, tmp_path, MADE.table, step=STEP)
    built = run("make", "build/step_testbench", *fast_build(tmp_path, f"g++ {SANITIZED}", precompiled), cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    done = run("build/step_testbench", cwd=tmp_path)
    assert "PASS: 6 launch(es) of 2 row(s), 0 problem(s)" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
