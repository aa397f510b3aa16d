"""Prefetch on replay end to end: the kernels' buffer follows the controller's records, and no logit changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import check_module, check_tool
from decoders import llama
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.drs.inputs import GateInputs
from fastcar_compile.drs.reader import read_table
from fastcar_compile.drs.simulator import simulate_step
from fastcar_compile.drs.table import DrsTable, Opcode
from fastcar_compile.errors import BackendError, InternalError
from fastcar_compile.runtime.backends.accelerator.stepper import accelerator_of
from fastcar_compile.runtime.session import Session

FRAME, LENGTH, LAYERS = 8, 49, 3
THRESHOLDS = (-float("inf"), 0.0, -float("inf"))
"""From the second frame on layers 0 and 2 replay, layer 1 now and then: held and replaced contents."""

Event = tuple[str, int]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """A small Llama for zcu102, two rows. Linears use the same kernel between MLPs, and must spare the buffer."""
    check_tool("g++")
    check_module("hls4ml")
    return fc.compile(
        llama(initializer_range=0.2, num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=176),
        "zcu102",
        tokens_per_frame=FRAME,
        max_seq_len=LENGTH,
        batch_size=2,
        quant="w8a8",
        replay=fc.ReplayConfig(threshold=THRESHOLDS),
        prefill_chunk=1,
        offload="linears",
        output=tmp_path_factory.mktemp("prefetch") / "artifact",
    )


@pytest.fixture
def tokens() -> Tensor:
    """ids [2, LENGTH - 1]"""
    return torch.randint(0, 17, (2, LENGTH - 1), generator=torch.Generator().manual_seed(1))


def table_of(artifact: fc.Artifact) -> DrsTable:
    return read_table((artifact.path / "drs" / "table.bin").read_bytes())


def decode(session: Session, tokens: Tensor, steps: int = LENGTH - 2) -> Tensor:
    """Logits of a prompt of one token and of `steps` more."""
    out = [session.prefill(tokens[:, :1])]
    out += [session.step(tokens[:, i]) for i in range(1, steps + 1)]
    return torch.stack(out)


def backend_of(session: Session) -> Any:
    return session._stepper


def watched(session: Session) -> list[Event]:
    """What the kernel is told to do with the buffer from now on: ("fill", layer) and ("take", layer)."""
    gate, events = backend_of(session)._gate, []
    decide = gate.decide

    def watching(layer: int, *operands: Any) -> Any:
        decision = decide(layer, *operands)
        of = {record.opcode: record.argument for record in gate.dispatched(layer).records}
        events.extend([("take", layer)] if of.get(Opcode.LOAD_WEIGHTS) else [])
        events.extend([("fill", (layer + 1) % LAYERS)] if Opcode.PREFETCH_NEXT in of else [])
        return decision

    gate.decide = watching
    return events


def simulated(table: DrsTable, decisions: np.ndarray) -> list[Event]:
    """The same from the Python simulator, for decisions [T, L, B]."""
    events, held = [], None
    for replayed in decisions:
        registers = [sum(1 << row for row, replays in enumerate(layer) if not replays) for layer in replayed]
        for layer, trace in enumerate(simulate_step(table, registers, held)):
            of = {record.opcode: record.argument for record in trace.records}
            events += [("take", layer)] if of.get(Opcode.LOAD_WEIGHTS) else []
            events += [("fill", (layer + 1) % LAYERS)] if Opcode.PREFETCH_NEXT in of else []
            held = trace.held
    return events


def poison(session: Session) -> None:
    """Other words in the kernel's buffer than anybody expects."""
    engine, weights = backend_of(session)._engine, backend_of(session)._weights["layer_0"]
    type(engine).prefetch(engine, [np.full_like(section, 0x5A) for section in weights])


def test_table_design_and_library_have_one_size(artifact: fc.Artifact) -> None:
    section = artifact.manifest.accelerator
    assert section is not None
    design = Design.of(section.design)
    assert design.prefetch_words in (128, 256, 512)
    assert table_of(artifact).prefetch == (design.prefetch_bytes,) * LAYERS
    assert section.controller.prefetch_bytes == design.prefetch_bytes


def test_the_kernel_executes_what_the_simulator_says(artifact: fc.Artifact, tokens: Tensor) -> None:
    cpu, hls = (artifact.session(name, record=True) for name in ("cpu", "hls-csim"))
    events = watched(hls)
    expected, actual = (decode(session, tokens) for session in (cpu, hls))
    assert torch.equal(actual, expected)
    assert np.array_equal(hls.stats.decisions, cpu.stats.decisions)
    assert events == simulated(table_of(artifact), hls.stats.decisions)
    assert ("take", 1) in events
    assert {("fill", layer) for layer in range(LAYERS)} & set(events) >= {("fill", 0), ("fill", 1)}


def test_a_decision_fills_the_buffer_that_the_mlp_takes(artifact: fc.Artifact, tokens: Tensor) -> None:
    """With zeros in memory where the buffer holds the weights the logits are right; with zeros in the buffer not."""
    cpu, beheaded, emptied = (artifact.session(name) for name in ("cpu", "hls-csim", "hls-csim"))
    design = Design.of(accelerator_of(artifact).design)
    engine, gate = backend_of(beheaded)._engine, backend_of(beheaded)._gate
    execute, taken = engine.execute, []

    def without_beginning(x: Any, rows: int, cached: Any, weights: Any) -> Any:
        layer = next(i for i in range(LAYERS) if weights is backend_of(beheaded)._weights[f"layer_{i}"])
        if any(r.argument for r in gate.dispatched(layer).records):
            taken.append(layer)
            weights = [section.copy() for section in weights]
            for section in weights:
                section[: 16 * design.axi_words * design.prefetch_words] = 0
        return execute(x, rows, cached, weights)

    engine.execute = without_beginning
    engine_of_zeros = backend_of(emptied)._engine
    bind, decide = engine_of_zeros.bind, backend_of(emptied)._gate.decide

    def deciding(layer: int, *operands: Any) -> Any:
        bind([np.zeros_like(section) for section in backend_of(emptied)._weights[f"layer_{layer}"]])
        return decide(layer, *operands)

    backend_of(emptied)._gate.decide = deciding
    expected = decode(cpu, tokens)
    assert torch.equal(decode(beheaded, tokens), expected)
    assert taken
    assert not torch.equal(decode(emptied, tokens), expected)


def test_reset_and_other_thresholds_empty_the_buffer(artifact: fc.Artifact, tokens: Tensor) -> None:
    """Stop where the buffer holds layer 0, spoil it, go on: the next forward must not take it."""
    cpu, hls = artifact.session("cpu"), artifact.session("hls-csim")
    events = watched(hls)
    steps = 2 * FRAME
    for session in (cpu, hls):
        decode(session, tokens, steps)
    assert events[-1] == ("fill", 0)
    poison(hls)
    for session in (cpu, hls):
        session.set_threshold(float("inf"))
    assert torch.equal(hls.step(tokens[:, steps + 1]), cpu.step(tokens[:, steps + 1]))
    assert events[-1] == ("fill", 0)
    for session in (cpu, hls):
        session.reset()
        session.set_threshold(list(THRESHOLDS))
        decode(session, tokens, steps)
    poison(hls)
    for session in (cpu, hls):
        session.reset()
    assert torch.equal(decode(hls, tokens, FRAME), decode(cpu, tokens, FRAME))


def test_two_sessions_have_a_buffer_each(artifact: fc.Artifact, tokens: Tensor) -> None:
    """Another session fills its own buffer between every two steps of the first."""
    cpu, hls, other = (artifact.session(name) for name in ("cpu", "hls-csim", "hls-csim"))
    expected = decode(cpu, tokens)
    first = hls.prefill(tokens[:, :1])
    assert torch.equal(first, expected[0])
    for i in range(1, LENGTH - 1):
        poison(other)
        assert torch.equal(hls.step(tokens[:, i]), expected[i])


def test_a_layer_is_executed_once_and_after_its_decision(artifact: fc.Artifact) -> None:
    hls = artifact.session("hls-csim")
    backend: Any = hls._stepper
    gate, x = backend._gate, np.ones((2, 64), np.float32)
    heads, none = np.ones((2, 4, 16), np.float32), np.zeros(2, np.int32)
    keys = np.ones((2, table_of(artifact).attention.kv_heads, 16), np.float32)
    gate.start(0, np.zeros(LAYERS, np.float32))
    inputs = GateInputs(query=heads, key=keys)
    backend.gate(1, inputs, none)
    backend.mlp(1, x, np.zeros(2, bool), x)
    with pytest.raises(BackendError, match=r"stopped with status NO_DISPATCH\n  where: layer 1"):
        backend.mlp(1, x, np.zeros(2, bool), x)
    backend.gate(1, inputs, none)
    with pytest.raises(
        InternalError, match="layer 1: the host's replay mask is not what the DRS controller dispatched"
    ):
        backend.mlp(1, x, np.array([True, False]), x)
