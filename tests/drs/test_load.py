"""The table on chip: loaded once, not read again; what a call moves over the AXI ports, counted in C simulation."""

import ctypes
import re
import subprocess
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from drs.conftest import WORDS
from drs.tables import FRAME, LATER, LIMITS, Controller, Traffic, call_for, controller_traffic, load_cycles, table_for
from drs.test_document import TEXT
from drs.unit import DrsUnit
from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.gate import pack_rows
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, LayerTrace, run_layer
from fastcar_compile.codegen.hls.control_table.table import (
    HEADER_WORDS,
    LAYER_FIELDS,
    AttentionShape,
    DrsTable,
    Status,
    table_words,
)
from fastcar_compile.codegen.hls.design.control_loops import ControlOp, ControlWork, control_loops
from fastcar_compile.codegen.hls.design.controller import controller_cycles, controller_usage
from fastcar_compile.codegen.hls.design.loops import Loop
from fastcar_compile.codegen.hls.interface import drs_interface
from fastcar_compile.codegen.hls.project import emit_drs
from fastcar_compile.runtime.backends.hls_csim import FLAGS, CsimUnit, ap_types_folder, compiler

LLAMA = AttentionShape(32, 32, 128)
ARGUMENTS = ("drs_table", "query", "key", "chain", "result")


def llama(rows: int) -> DrsTable:
    """LLaMA-2-7B, layer 1 without a gate."""
    scales = [None if layer == 1 else 1.0 for layer in range(32)]
    return build_table(32, rows, 8, FRAME, [0.0] * 32, attention=LLAMA, scales=scales)


def llama_call(rows: int, layer: int = 0) -> LayerCall:
    """Every row of q is against the key, so every row computes."""
    ones = np.ones((rows, 32, 128), np.float32)
    counts = np.zeros(rows, np.int32)
    return LayerCall(layer, LATER, pack_rows(-ones), pack_rows(ones), counts)


@dataclass(frozen=True)
class Counting:
    """A controller for 32 rows of LLaMA-2-7B that counts."""

    kernel: DrsUnit
    library: ctypes.CDLL

    def moved(self) -> dict[str, Traffic]:
        """Argument -> what was moved since the last question."""
        counts = (ctypes.c_uint32 * (2 * len(ARGUMENTS)))()
        self.library.moved(counts)
        return {name: Traffic(counts[i], counts[i + len(ARGUMENTS)]) for i, name in enumerate(ARGUMENTS)}


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    folder = tmp_path_factory.mktemp("traffic")
    table = llama(32)
    for name, text in emit_drs(table, table.limits).items():
        (folder / name).write_text(text)
    sources = ["-include", str(Path(__file__).with_name("traffic.hpp")), str(folder / "fastcar_drs.cpp")]
    include = [f"-I{folder}", f"-I{files('hls_templates')}", "-isystem", str(ap_types_folder())]
    command = [compiler(), *FLAGS, *include, *sources, "-o", str(folder / "counting.so")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(folder / "counting.so"))
    return Counting(DrsUnit(CsimUnit(library, drs_interface(WORDS, query_words=WORDS, key_words=WORDS).part)), library)


def test_there_is_no_table_before_a_load_and_after_one_that_failed(controller: Controller) -> None:
    good, call = table_for().to_bytes(), call_for(0b010)
    assert controller.kernel.load(good) is Status.OK
    assert controller.kernel.run(call, 3) == run_layer(good, call)
    assert controller.kernel.load(good[:-1]) is Status.BAD_LENGTH
    assert controller.kernel.run(call, 0) == LayerTrace(Status.NO_TABLE)


def test_another_table_than_the_host_counts_on_is_noticed(controller: Controller) -> None:
    """As when another program loads its own."""
    kernel, call = controller.kernel, call_for(0b010)
    assert kernel.load(table_for().to_bytes()) is Status.OK
    other = DrsUnit(kernel._unit)
    assert other.load(table_for(2).to_bytes()) is Status.OK
    assert kernel.run(call, 0).status is Status.NO_TABLE
    assert other.run(call_for(0b01, 2), 2).status is Status.OK


def test_a_call_does_not_read_the_table(controller: Controller) -> None:
    """Its buffer holds something else by then."""
    table, call = table_for(), call_for(0b101)
    assert controller.kernel.load(table.to_bytes()) is Status.OK
    controller.kernel._unit.write("drs_table", np.full(4096, 0x5A, np.uint8))
    for layer in range(3):
        there = call_for(0b101, layer=layer)
        assert controller.kernel.run(there, 3) == run_layer(table, there)
    assert controller.kernel.run(call, 3) == run_layer(table, call)


@pytest.mark.parametrize("rows", [1, 2, 32])
def test_what_a_call_moves_is_what_the_model_says(csim_tools: None, counting: Counting, rows: int) -> None:
    table = llama(rows)
    counting.moved()
    assert counting.kernel.load(table.to_bytes()) is Status.OK
    words = table_words(32)
    loaded = counting.moved()
    assert (loaded["drs_table"].beats, loaded["result"]) == (-(-words // 4), Traffic(1, 1))
    trace = counting.kernel.run(llama_call(rows), rows)
    assert (trace.status, trace.index_register) == (Status.OK, (1 << rows) - 1)
    moved = counting.moved()
    assert moved["drs_table"] == Traffic(0, 0)
    assert moved["query"] == moved["key"] == Traffic(4 * rows, 1024 * rows)
    assert (moved["chain"].bursts, moved["result"].bursts) == (1, 1)
    total = Traffic(sum(m.bursts for m in moved.values()), sum(m.beats for m in moved.values()))
    assert total == controller_traffic(table)


def test_a_layer_without_a_gate_moves_two_bursts(csim_tools: None, counting: Counting) -> None:
    assert counting.kernel.load(llama(1).to_bytes()) is Status.OK
    counting.moved()
    assert counting.kernel.run(llama_call(1, layer=1), 1).status is Status.OK
    moved = counting.moved()
    assert [moved[name].bursts for name in ARGUMENTS] == [0, 0, 0, 1, 1]
    assert f"| GATE without a gate, one row | 2 | {sum(m.beats for m in moved.values())} |" in TEXT


def test_the_document_has_the_figures() -> None:
    one, many = controller_traffic(llama(1)), controller_traffic(llama(32))
    assert f"| GATE, LLaMA-2-7B, one row computes | {one.bursts} | {one.beats:,} |" in TEXT
    assert f"| GATE, LLaMA-2-7B, 32 rows compute | {many.bursts} | {many.beats:,} |" in TEXT
    assert f"{-(-table_words(32) // 4)} words for LLaMA-2-7B." in re.sub(r"\s+", " ", TEXT)


def test_clocks_and_memories_are_those_of_the_explanation() -> None:
    """docs/explanation/accelerator.md: the example, and LLaMA-2-7B with one row."""
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "accelerator.md").read_text()
    example = build_table(4, 2, 2, 256, [0.0] * 4, attention=AttentionShape(4, 4, 32), scales=[1.0] * 4)
    assert f"The example (B = 2, four heads of 32) takes {controller_cycles(example)}" in text
    table = llama(1)
    assert f"LLaMA-2-7B with one row takes {controller_cycles(table):,}" in text
    assert f"Loading its table takes {load_cycles(table)} clocks" in text
    trips = sum(loop.trips for loop in loops_of(example))
    assert trips == (1 + 2 * (32 + 32) + 17) + 2 * 32 + (1 + 2 * 1 + 2)
    usage = controller_usage(table.limits)
    assert f"{usage.dsp} DSP and {usage.bram36} BRAM36" in text


def loops_of(table: DrsTable) -> tuple[Loop, ...]:
    """The loops of a decision after which every row computes."""
    return control_loops(ControlWork(ControlOp.GATE, table))


def test_the_loops_move_what_is_counted() -> None:
    """Beats are those of C simulation (see above); every loop that moves words asks for them in one run."""
    for table in (llama(1), llama(32)):
        moving = [loop for loop in loops_of(table) if loop.moves]
        assert sum(loop.trips for loop in moving) == controller_traffic(table).beats
        assert len(moving) == 2 * table.rows + 2


def test_a_table_of_the_limits_is_loaded(controller: Controller) -> None:
    """As many words as the hardware holds, to one layer."""
    layers = (LIMITS.table_words - HEADER_WORDS) // LAYER_FIELDS
    table = table_for(32, layers=layers)
    assert len(table.to_bytes()) // 4 <= LIMITS.table_words < table_words(layers + 1)
    controller.agreed(table, call_for(0b1, 32, layers - 1))
