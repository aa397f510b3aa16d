"""The one kernel: the controller decides, the array computes what the host says; against simulator and reference."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from drs.oracle import places

from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, run_layer
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, DrsTable, pack_rows
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import kernel_interface
from fastcar_compile.codegen.hls.packing import pack_mlp
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.codegen.hls.step_program.builder import short_program
from fastcar_compile.codegen.hls.step_program.cache_layout import Rows
from fastcar_compile.errors import BackendError, InternalError
from fastcar_compile.runtime.backends.accelerator.kernel import Kernel
from fastcar_compile.runtime.backends.hls_csim import CsimUnit, open_library
from hls.library import Array, assert_same_bits, design, random_layer, reference
from hls.sources import folder_sources
from hls.test_project import run_program

LAYERS, ROWS, FRAME, LATER = 3, 6, 4, 9
MADE = design(100, 140, ROWS, 4, layers=LAYERS, quant="w4a8")
SHAPE = AttentionShape(2, 1, 6)


def table_for(rows: int = ROWS, cores: int = MADE.mlp.cores) -> DrsTable:
    """Layers 0 and 1 have a gate at 0, layer 2 has none."""
    sizes = (LAYERS, rows, cores, FRAME, [0.0] * LAYERS)
    return build_table(*sizes, attention=SHAPE, scales=[1.0, 1.0, None])


@dataclass(frozen=True)
class Loaded:
    """The kernel in C simulation with random weights of every layer."""

    kernel: Kernel
    x: Array
    cached: Array
    computed: list[Array]

    def expected(self, layer: int, register: int) -> Array:
        """Rows that compute, and copies of the others."""
        computes = np.array([register >> row & 1 for row in range(ROWS)], bool)
        return np.where(computes[:, None], self.computed[layer], self.cached)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder, rng, table = tmp_path_factory.mktemp("control"), np.random.default_rng(3), table_for()
    step = StepDesign.of(short_program(MADE, table))
    emit_hls(MADE, folder, table)
    unit = CsimUnit(open_library(folder_sources(folder), folder / "build"), kernel_interface(MADE, step, table).part)
    layers = [random_layer(MADE.mlp, rng) for _ in range(LAYERS)]
    sections = [pack_mlp(layer, MADE).reshape(MADE.axi_weight_ports, -1) for layer in layers]
    tensors = {f"weights_{p}": np.concatenate([s[p] for s in sections]) for p in range(MADE.axi_weight_ports)}
    x, cached = rng.normal(size=(2, ROWS, MADE.mlp.hidden)).astype(np.float32)
    kernel = Kernel(unit, step.program.to_bytes(table), tensors)
    return Loaded(kernel, x, cached, [reference(x, layer, MADE.mlp) for layer in layers])


def call_of(layer: int, register: int) -> LayerCall:
    """A call whose scores ask for this Index Register."""
    signs = np.array([-1.0 if register >> row & 1 else 1.0 for row in range(ROWS)], np.float32)
    query = pack_rows(np.broadcast_to(signs[:, None, None], (ROWS, SHAPE.heads, SHAPE.head_dim)))
    key = pack_rows(np.ones((ROWS, SHAPE.kv_heads, SHAPE.head_dim), np.float32))
    return LayerCall(layer, LATER, query, key, np.zeros(ROWS, np.int32))


def test_forwards_of_random_decisions(csim_tools: None, loaded: Loaded) -> None:
    """Every pattern as it comes. The array takes the register that the host gives it, and keeps the table on chip."""
    rng, table, kernel = np.random.default_rng(4), table_for(), loaded.kernel
    kernel.load(kernel.program.to_bytes(table))
    for _ in range(12):
        for layer in range(LAYERS):
            register = int(rng.choice([0, 2**ROWS - 1, *rng.integers(1, 2**ROWS, 3)]))
            if layer < 2:
                trace = kernel.decide(call_of(layer, register))
                assert trace == run_layer(table, call_of(layer, register), limits=table.limits)
                assert trace.index_register == register
            assert_same_bits(kernel.mlp(layer, loaded.x, register, loaded.cached), loaded.expected(layer, register))


def test_a_table_of_another_array_is_refused(csim_tools: None, loaded: Loaded) -> None:
    """More or fewer rows than the array, or other cores. Then nothing runs."""
    program = loaded.kernel.program
    for rows, cores in ((ROWS, 2), (ROWS + 1, 4)):
        with pytest.raises(BackendError, match="refuses the control table with status BAD_HEADER"):
            loaded.kernel.load(program.to_bytes(table_for(rows, cores)))
    with pytest.raises(BackendError, match="stopped with status NOT_LOADED at instruction 0"):
        loaded.kernel.decide(call_of(0, 1))
    loaded.kernel.load(program.to_bytes(table_for()))
    assert_same_bits(loaded.kernel.mlp(0, loaded.x, 3, loaded.cached), loaded.expected(0, 3))


def test_a_decision_of_other_sizes_is_refused(csim_tools: None, loaded: Loaded) -> None:
    """By the host, which would write beyond them."""
    call = call_of(0, 1)
    with pytest.raises(InternalError, match="operands of 24 and 11 words; the step program reads 24 and 12"):
        loaded.kernel.decide(replace(call, key=call.key[:-1]))


def test_a_launch_begins_behind_an_end(csim_tools: None, loaded: Loaded) -> None:
    for entry in (1, 3, len(loaded.kernel.program.instructions), 2**32 - 1):
        with pytest.raises(BackendError, match="stopped with status NOT_LOADED"):
            loaded.kernel.launch(Rows.at(loaded.kernel.program.sizes), loaded.x, entry=entry)


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
