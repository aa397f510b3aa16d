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
from fastcar_compile.drs.reader import read_table
from fastcar_compile.drs.simulator import simulate_step
from fastcar_compile.drs.table import DrsTable, Opcode
from fastcar_compile.errors import InternalError
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
    """What the session does with the buffer from now on: ("fill", layer) and ("take", layer)."""
    engine, weights, events = backend_of(session)._engine, backend_of(session)._weights, []
    layers = [weights[f"layer_{i}"] for i in range(LAYERS)]
    mlp, prefetch = engine.mlp, engine.prefetch

    def layer_of(stream: list[np.ndarray]) -> int:
        return next(i for i, own in enumerate(layers) if own is stream)

    def taking(x: Any, rows: int, cached: Any, stream: Any, *, held: bool = False) -> Any:
        events.extend([("take", layer_of(stream))] if held else [])
        return mlp(x, rows, cached, stream, held=held)

    def filling(stream: Any) -> None:
        events.append(("fill", layer_of(stream)))
        prefetch(stream)

    engine.mlp, engine.prefetch = taking, filling
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
    assert backend_of(artifact.session("hls-csim"))._prefetch_bytes == design.prefetch_bytes


def test_logits_are_the_same_with_and_without_prefetch(artifact: fc.Artifact, tokens: Tensor) -> None:
    cpu, hls, without = (artifact.session(name, record=True) for name in ("cpu", "hls-csim", "hls-csim"))
    backend_of(without)._prefetch_bytes = 0
    events, none = watched(hls), watched(without)
    expected, actual, plain = (decode(session, tokens) for session in (cpu, hls, without))
    assert torch.equal(actual, expected)
    assert torch.equal(plain, expected)
    assert np.array_equal(hls.stats.decisions, cpu.stats.decisions)
    assert events == simulated(table_of(artifact), hls.stats.decisions)
    assert ("take", 1) in events
    assert {("fill", layer) for layer in range(LAYERS)} & set(events) >= {("fill", 0), ("fill", 1)}
    assert none == []


def test_the_words_in_the_buffer_are_those_that_the_cores_get(artifact: fc.Artifact, tokens: Tensor) -> None:
    """Otherwise the comparison above would prove nothing: with other words in the buffer the logits are others."""
    cpu, hls = artifact.session("cpu"), artifact.session("hls-csim")
    engine = backend_of(hls)._engine
    prefetch = engine.prefetch
    engine.prefetch = lambda sections: prefetch([np.zeros_like(section) for section in sections])
    assert not torch.equal(decode(hls, tokens), decode(cpu, tokens))


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


def test_a_buffer_that_does_not_hold_what_the_controller_counts_on_is_told(
    artifact: fc.Artifact, tokens: Tensor
) -> None:
    hls = artifact.session("hls-csim")
    backend: Any = hls._stepper
    backend._gate.prefetched, backend._gate.computed = lambda layer: 64, lambda layer: 0b11
    x = np.zeros((2, 64), np.float32)
    size = backend._prefetch_bytes
    text = f"layer 1: the controller counts on 64 prefetched bytes; the kernel has layer None in {size} bytes"
    with pytest.raises(InternalError, match=text):
        backend.mlp(1, x, np.zeros(2, bool), x)
