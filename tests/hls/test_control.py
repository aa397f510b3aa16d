"""The one kernel: the controller decides and dispatches, the array executes; against simulator and reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from fastcar_compile.codegen.hls.controller_project import control_sizes, limits_of
from fastcar_compile.codegen.hls.interface import engine_interface
from fastcar_compile.codegen.hls.packing import pack_mlp
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.drs.builder import build_table
from fastcar_compile.drs.gate import pack_heads
from fastcar_compile.drs.simulator import LayerCall, LayerTrace, run_layer
from fastcar_compile.drs.table import AttentionShape, DrsTable, Instruction, Opcode, Status
from fastcar_compile.runtime.backends.accelerator.controller import Controller
from fastcar_compile.runtime.backends.accelerator.engine import Engine
from fastcar_compile.runtime.backends.accelerator.unit import Buffer
from fastcar_compile.runtime.backends.hls_csim.build import folder_sources, open_library
from fastcar_compile.runtime.backends.hls_csim.unit import CsimUnit
from hls.library import Array, assert_same_bits, design, random_layer, reference

LAYERS, ROWS, FRAME, LATER = 3, 6, 4, 9
MADE = design(100, 140, ROWS, 4, layers=LAYERS, quant="w4a8")
SHAPE = AttentionShape(2, 1, 6)
NO_HEADS = np.zeros((0, 4), np.float32)


def table_for(prefetch: int = MADE.prefetch_bytes) -> DrsTable:
    """Layers 0 and 1 have a gate at 0, layer 2 has none."""
    zeros, scales = [0.0] * LAYERS, [1.0, 1.0, None]
    sizes = (LAYERS, ROWS, MADE.mlp.cores, FRAME)
    return build_table(*sizes, zeros, attention=SHAPE, scales=scales, prefetch=[prefetch] * LAYERS)


@dataclass(frozen=True)
class Kernel:
    """The engine in C simulation with random weights of every layer, its table loaded."""

    engine: Engine
    controller: Controller
    x: Array
    cached: Array
    computed: list[Array]
    weights: list[list[Buffer]]

    def decide(self, table: DrsTable, call: LayerCall) -> LayerTrace:
        """The kernel's decision, which is that of the simulator; the buffer is filled when it says so."""
        self.engine.bind(self.weights[(call.layer + 1) % LAYERS])
        trace = self.controller.run(call, ROWS)
        assert trace == run_layer(table, call, limits=limits_of(table))
        return trace

    def execute(self, call: LayerCall, mask: int, weights: list[Buffer] | None = None) -> tuple[LayerTrace, Array]:
        """Answer and rows of the layer's MLP."""
        self.controller.prepare(call)
        rows = self.engine.execute(self.x, mask, self.cached, weights or self.weights[call.layer])
        return self.controller.answer(ROWS), rows

    def expected(self, layer: int, register: int) -> Array:
        """Rows that compute, and copies of the others."""
        computes = np.array([register >> row & 1 for row in range(ROWS)], bool)
        return np.where(computes[:, None], self.computed[layer], self.cached)

    def beheaded(self, layer: int) -> list[Buffer]:
        """The layer's weights with zeros where the prefetch buffer holds them."""
        sections = [section.copy() for section in self.weights[layer]]
        for section in sections:
            section[: 16 * MADE.axi_words * MADE.prefetch_words] = 0
        return sections


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder, rng, table = tmp_path_factory.mktemp("control"), np.random.default_rng(3), table_for()
    emit_hls(MADE, folder, table)
    unit = CsimUnit(
        open_library(folder_sources(folder), folder / "build"), engine_interface(MADE, control_sizes(table)).part
    )
    engine, controller = Engine(unit, MADE.mlp.hidden, ROWS), Controller(unit)
    x, cached = rng.normal(size=(2, ROWS, MADE.mlp.hidden)).astype(np.float32)
    layers = [random_layer(MADE.mlp, rng) for _ in range(LAYERS)]
    weights = [engine.load(f"layer_{i}", pack_mlp(layer, MADE)) for i, layer in enumerate(layers)]
    engine.bind(weights[0])
    return Kernel(engine, controller, x, cached, [reference(x, layer, MADE.mlp).y for layer in layers], weights)


def call_of(layer: int, register: int, held: int | None) -> LayerCall:
    """A call whose scores ask for this Index Register."""
    signs = np.array([-1.0 if register >> row & 1 else 1.0 for row in range(ROWS)], np.float32)
    query = pack_heads(np.broadcast_to(signs[:, None, None], (ROWS, SHAPE.heads, SHAPE.head_dim)))
    key = pack_heads(np.ones((ROWS, SHAPE.kv_heads, SHAPE.head_dim), np.float32))
    return LayerCall(layer, LATER, query, key, np.zeros(ROWS, np.int32), held)


def test_forwards_of_random_decisions(csim_tools: None, kernel: Kernel) -> None:
    """Every pattern as it comes; weights that the buffer holds are zeros in memory."""
    rng, table, held, taken, filled = np.random.default_rng(4), table_for(), None, 0, 0
    assert MADE.prefetch_words > 0
    assert kernel.controller.load(table.to_bytes()) is Status.OK
    for _ in range(12):
        for layer in range(LAYERS):
            register = int(rng.choice([0, 0, 2**ROWS - 1, *rng.integers(1, 2**ROWS, 3)]))
            call = call_of(layer, register, held)
            if layer == 2:
                call = replace(call, query=NO_HEADS, key=NO_HEADS, mask=register)
                expected = run_layer(table, call, limits=limits_of(table))
            else:
                expected = kernel.decide(table, call)
                filled += any(r.opcode is Opcode.PREFETCH_NEXT for r in expected.records)
            if register:
                loads = sum(r.argument for r in expected.records if r.opcode is Opcode.LOAD_WEIGHTS)
                taken += loads > 0
                answer, rows = kernel.execute(call, register, kernel.beheaded(layer) if loads else None)
                assert answer.status is Status.OK
                assert answer.index_register == register
                assert layer != 2 or answer == expected
                assert_same_bits(rows, kernel.expected(layer, register))
            held = expected.held if register or layer != 2 else held
    assert taken > 3
    assert filled > 3


def test_a_queue_is_executed_once_and_by_its_layer(csim_tools: None, kernel: Kernel) -> None:
    table = table_for()
    assert kernel.controller.load(table.to_bytes()) is Status.OK
    call = call_of(0, 0b101, None)
    assert kernel.execute(call, 0b101)[0].status is Status.NO_DISPATCH
    kernel.decide(table, call)
    assert kernel.execute(replace(call, layer=1), 0b101)[0].status is Status.NO_DISPATCH
    kernel.decide(table, call)
    assert kernel.execute(call, 0b101)[0].status is Status.OK
    assert kernel.execute(call, 0b101)[0].status is Status.NO_DISPATCH
    kernel.decide(table, call)
    assert kernel.controller.load(table.to_bytes()) is Status.OK
    assert kernel.execute(call, 0b101)[0].status is Status.NO_DISPATCH


def test_the_array_executes_instructions_not_the_register(csim_tools: None, kernel: Kernel) -> None:
    """A table whose layer 0 neither computes row 1 nor copies row 4 leaves both rows of y as they were."""
    table = table_for()
    barrier = Instruction(Opcode.BARRIER, 0)
    left_out = (Instruction(Opcode.COMPUTE_MLP, 0, 1), Instruction(Opcode.REPLAY_COPY, 0, 4))
    first = tuple(barrier if word in left_out else word for word in table.instructions[0])
    assert first != table.instructions[0]
    table = replace(table, instructions=(first, *table.instructions[1:]))
    assert kernel.controller.load(table.to_bytes()) is Status.OK
    kernel.engine.unit.write("y", np.full(4 * ROWS * MADE.mlp.hidden, 0xFF, np.uint8))
    kernel.decide(table, call_of(0, 0b001111, None))
    answer, rows = kernel.execute(call_of(0, 0b001111, None), 0b001111)
    assert (answer.status, answer.index_register) == (Status.OK, 0b001101)
    want = kernel.expected(0, 0b001111)
    assert_same_bits(rows[[0, 2, 3, 5]], want[[0, 2, 3, 5]])
    assert np.isnan(rows[[1, 4]]).all()


def test_a_table_that_the_array_cannot_execute_is_refused(csim_tools: None, kernel: Kernel) -> None:
    """More rows than the array, or so few cores that the rows need more passes."""
    cases = ((ROWS, 4, Status.OK), (ROWS, 2, Status.BAD_HEADER), (4, 2, Status.OK), (ROWS + 1, 4, Status.BAD_HEADER))
    for rows, cores, expected in cases:
        table = build_table(2, rows, cores, FRAME, [0.0] * 2, attention=SHAPE, scales=[1.0] * 2)
        assert kernel.controller.load(table.to_bytes()) is expected


def test_controller_and_array_are_of_one_size(tmp_path: Path) -> None:
    """The sources say so to the compiler: a table of other cores gives no kernel."""
    other = build_table(LAYERS, ROWS, 3, FRAME, [0.0] * LAYERS, attention=SHAPE)
    emit_hls(MADE, tmp_path, other)
    assert "CORES = 3" in (tmp_path / "fastcar_drs_config.hpp").read_text()
    assert "static_assert(DrsConfig::CORES == EngineConfig::CORES" in (tmp_path / "fastcar_engine.cpp").read_text()
