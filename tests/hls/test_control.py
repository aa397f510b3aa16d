"""The one kernel: the controller decides, the array computes what the host says; against simulator and reference."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drs.oracle import places

from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, DrsTable, pack_rows
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import kernel_interface
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.codegen.hls.step_program.builder import short_program
from fastcar_compile.codegen.hls.step_program.cache_layout import Rows
from fastcar_compile.errors import BackendError, InternalError
from fastcar_compile.runtime.backends.accelerator.kernel import Kernel
from fastcar_compile.runtime.backends.hls_csim import CsimUnit, open_library
from hls.library import design
from hls.sources import folder_sources
from hls.test_project import run_program

LAYERS, ROWS, FRAME, LATER = 3, 6, 4, 9
MADE = design(100, 140, ROWS, 4, layers=LAYERS, quant="w4a8")
SHAPE = AttentionShape(2, 1, 6)


def table_for(rows: int = ROWS, cores: int = MADE.mlp.cores) -> DrsTable:
    """Layers 0 and 1 have a gate at 0, layer 2 has none."""
    sizes = (LAYERS, rows, cores, FRAME, [0.0] * LAYERS)
    return build_table(*sizes, attention=SHAPE, scales=[1.0, 1.0, None])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The kernel in C simulation, whose weights are zero."""
    folder, table = tmp_path_factory.mktemp("control"), table_for()
    step = StepDesign.of(short_program(MADE, table))
    emit_hls(MADE, folder, table)
    unit = CsimUnit(open_library(folder_sources(folder), folder / "build"), kernel_interface(MADE, step, table).part)
    size = LAYERS * MADE.stream_bytes // MADE.axi_weight_ports
    tensors = {f"weights_{p}": np.zeros(size, np.uint8) for p in range(MADE.axi_weight_ports)}
    return Kernel(unit, step.program.to_bytes(table), tensors)


def call_of(layer: int, register: int) -> LayerCall:
    """A call whose scores ask for this Index Register."""
    signs = np.array([-1.0 if register >> row & 1 else 1.0 for row in range(ROWS)], np.float32)
    query = pack_rows(np.broadcast_to(signs[:, None, None], (ROWS, SHAPE.heads, SHAPE.head_dim)))
    key = pack_rows(np.ones((ROWS, SHAPE.kv_heads, SHAPE.head_dim), np.float32))
    return LayerCall(layer, LATER, query, key, np.zeros(ROWS, np.int32))


def test_a_table_of_another_array_is_refused(csim_tools: None, kernel: Kernel) -> None:
    """More or fewer rows than the array, or other cores. Then nothing runs, until the right one is loaded."""
    program = kernel.program
    for rows, cores in ((ROWS, 2), (ROWS + 1, 4)):
        with pytest.raises(BackendError, match="refuses the control table with status BAD_HEADER"):
            kernel.load(program.to_bytes(table_for(rows, cores)))
    with pytest.raises(BackendError, match="stopped with status NOT_LOADED at instruction 0"):
        kernel.decide(call_of(0, 1))
    kernel.load(program.to_bytes(table_for()))
    assert kernel.decide(call_of(0, 0b101)).index_register == 0b101


def test_a_decision_of_other_sizes_is_refused(csim_tools: None, kernel: Kernel) -> None:
    """By the host, which would write beyond them."""
    call = call_of(0, 1)
    with pytest.raises(InternalError, match="operands of 24 and 11 words; the step program reads 24 and 12"):
        kernel.decide(replace(call, key=call.key[:-1]))


def test_a_launch_begins_behind_an_end(csim_tools: None, kernel: Kernel) -> None:
    x = np.zeros((ROWS, MADE.mlp.hidden), np.float32)
    for entry in (1, 3, len(kernel.program.instructions), 2**32 - 1):
        with pytest.raises(BackendError, match="stopped with status NOT_LOADED"):
            kernel.launch(Rows.at(kernel.program.sizes), x, entry=entry)


def test_controller_and_array_are_of_one_size(tmp_path: Path) -> None:
    """The sources say so to the compiler: a table of other cores gives no kernel."""
    emit_hls(MADE, tmp_path, table_for(cores=3))
    assert "CORES = 3" in (tmp_path / "fastcar_drs_config.hpp").read_text()
    assert "static_assert(DrsConfig::CORES == EngineConfig::CORES" in (tmp_path / "fastcar_step.cpp").read_text()


PLACES = """
#include <stdio.h>
#include "fastcar_mapping.hpp"
int main() {
    uint32_t state = 1;
    for (int i = 0; i < 2000; ++i) {
        state = state * 1664525u + 1013904223u;
        const uint32_t computing = state ^ state >> 16;
        const int rows = 1 + i % 32, cores = 1 + i / 32 % 32;
        fastcar::core_t core_of[32];
        fastcar::pass_t pass_of[32];
        const int passes = fastcar::place_rows<fastcar::PLACE_BITS>(computing, rows, cores, core_of, pass_of);
        printf("%u %d %d %d", computing, rows, cores, passes);
        for (int b = 0; b < rows; ++b) printf(" %u %u", core_of[b].to_uint(), pass_of[b].to_uint());
        printf("\\n");
    }
    return 0;
}
"""


def test_the_array_places_rows_as_the_mapping_registers_say(csim_tools: None, tmp_path: Path) -> None:
    """For random Index Registers, every number of rows and of cores."""
    for line in run_program(PLACES, tmp_path).decode().splitlines():
        register, rows, cores, passes, *found = map(int, line.split())
        wanted = places([bool(register >> row & 1) for row in range(rows)], cores)
        assert [number for place in wanted for number in place or (0, 0)] == found
        assert passes == -(-(register & (1 << rows) - 1).bit_count() // cores)
