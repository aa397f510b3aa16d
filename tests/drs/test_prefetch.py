"""The prefetch buffer over whole decode forwards: controller, simulator and oracle hand on the same content."""

from __future__ import annotations

import numpy as np

from drs.oracle import Situation, schedule
from drs.tables import FRAME, LATER, Controller, call_for, table_for
from fastcar_compile.drs.simulator import DispatchTrace, simulate_step
from fastcar_compile.drs.table import Opcode

SIZES = (100, 200, 300)
"""Bytes of the next layer that fit, per layer: of layer 1, of layer 2, of layer 0."""

COMPUTE, SKIP = 0b11, 0b00


def prefetching(sizes: tuple[int, ...] = SIZES, rows: int = 2) -> dict:
    return {"rows": rows, "layers": len(sizes), "prefetch": sizes}


def arguments(traces: tuple[DispatchTrace, ...]) -> list[tuple[int | None, int | None]]:
    """Per layer the argument of LOAD_WEIGHTS and of PREFETCH_NEXT; None where it was not dispatched."""
    found = []
    for trace in traces:
        of = {r.opcode: r.argument for r in trace.records}
        found.append((of.get(Opcode.LOAD_WEIGHTS), of.get(Opcode.PREFETCH_NEXT)))
    return found


def test_a_skipped_layer_prefetches_what_the_next_one_then_need_not_load() -> None:
    traces = simulate_step(table_for(**prefetching()), [SKIP, COMPUTE, COMPUTE])
    assert arguments(traces) == [(None, 100), (100, None), (0, None)]
    assert [t.held for t in traces] == [1, None, None]


def test_a_skipped_layer_after_a_skipped_one_gives_the_buffer_to_its_own_next() -> None:
    """What was held of layer 1 is discarded: layer 2 comes first."""
    traces = simulate_step(table_for(**prefetching()), [SKIP, SKIP, COMPUTE])
    assert arguments(traces) == [(None, 100), (None, 200), (200, None)]


def test_the_last_layer_prefetches_for_the_next_forward() -> None:
    table = table_for(**prefetching())
    first = simulate_step(table, [COMPUTE, COMPUTE, SKIP])
    assert arguments(first) == [(0, None), (0, None), (None, 300)]
    assert first[-1].held == 0
    assert arguments(simulate_step(table, [COMPUTE] * 3, first[-1].held)) == [(300, None), (0, None), (0, None)]


def test_partly_replayed_layers_load() -> None:
    traces = simulate_step(table_for(**prefetching()), [SKIP, 0b01, 0b10])
    assert arguments(traces) == [(None, 100), (100, None), (0, None)]


def test_without_room_nothing_is_prefetched() -> None:
    traces = simulate_step(table_for(**prefetching((0, 200, 0))), [SKIP, SKIP, SKIP])
    assert arguments(traces) == [(None, None), (None, 200), (None, None)]
    assert [t.held for t in traces] == [None, 2, 2]


def test_a_layer_that_is_held_is_not_fetched_again() -> None:
    """A decoder of one layer: its next is itself."""
    table = table_for(**prefetching((64,)))
    first = simulate_step(table, [SKIP])
    assert arguments(first) == [(None, 64)]
    second = simulate_step(table, [SKIP], first[-1].held)
    assert arguments(second) == [(None, None)]
    assert arguments(simulate_step(table, [COMPUTE], second[-1].held)) == [(64, None)]


def test_three_readers_over_many_forwards(controller: Controller) -> None:
    rng = np.random.default_rng(8)
    for _ in range(30):
        layers, rows = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        sizes = tuple(int(v) for v in rng.choice([0, 8192, 65536], layers))
        table, held = table_for(**prefetching(sizes, rows)), None
        for _ in range(8):
            skipped = rng.random((layers, 1)) < 0.5
            wants = (rng.random((layers, rows)) < 0.5) | skipped
            registers = [sum(1 << row for row in range(rows) if not want[row]) for want in wants]
            traces = simulate_step(table, registers, held)
            for layer, (register, trace) in enumerate(zip(registers, traces, strict=True)):
                hardware = controller.agreed(table, call_for(register, rows, layer, held=held))
                want = [bool(w) for w in wants[layer]]
                answer = schedule(Situation(want, [0] * rows, 2, LATER, FRAME, layer=layer, prefetch=sizes, held=held))
                assert (hardware.records, hardware.held) == (trace.records, trace.held)
                dispatched = [(r.opcode.name, r.row, r.core, r.pass_number, r.argument) for r in trace.records]
                assert dispatched == answer.dispatched
                held = answer.held
                assert trace.held == held
