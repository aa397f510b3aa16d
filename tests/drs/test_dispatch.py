"""Three readers of one table: HLS controller in C simulation, Python simulator, an oracle written from the design."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drs.oracle import Answer, Situation, schedule
from drs.tables import FRAME, LATER, LIMITS, Controller, call_for, numbers, table_for
from fastcar_compile.drs.builder import build_table
from fastcar_compile.drs.simulator import DispatchRecord, LayerCall, LayerTrace, map_rows, simulate
from fastcar_compile.drs.table import DrsTable, Opcode, Status

RANDOM_CALLS = 10_000


def assert_is(trace: LayerTrace, answer: Answer) -> None:
    """The controller's answer is the oracle's."""
    assert trace.status is Status.OK
    assert trace.index_register == sum(1 << row for row, computes in enumerate(answer.computes) if computes)
    assert [(r.opcode.name, r.row, r.core, r.pass_number, r.argument) for r in trace.records] == answer.dispatched
    assert trace.held == answer.held
    assert list(trace.chain) == answer.chain


@pytest.mark.parametrize(
    ("rows", "coupled"), [*((rows, False) for rows in range(1, 9)), *((rows, True) for rows in (2, 4, 6, 8))]
)
def test_every_pattern_on_every_number_of_cores(controller: Controller, rows: int, coupled: bool) -> None:
    for cores in (1, 2, 3, 4, 8):
        table = table_for(rows, cores, couple_cfg=coupled)
        for register in range(1 << rows):
            layer = register % 3
            wants = [not register >> row & 1 for row in range(rows)]
            trace = controller.agreed(table, call_for(register, rows, layer))
            assert_is(trace, schedule(Situation(wants, [0] * rows, cores, LATER, FRAME, coupled, prefetch=(0,) * 3)))


def random_situation(rng: np.random.Generator, tables: list[DrsTable]) -> tuple[DrsTable, Situation]:
    """Half of the rows or nearly none or nearly all replay; step, chain and prefetch buffer as they come."""
    table = tables[rng.integers(len(tables))]
    rows = table.rows
    share = rng.choice([0.02, 0.5, 0.98, 1.0])
    situation = Situation(
        wants=[bool(w) for w in rng.random(rows) < share],
        chain=rng.integers(0, 4, rows).tolist(),
        cores=table.cores,
        step=int(rng.choice([0, FRAME - 1, FRAME, LATER, 2**32 - 1], p=[0.05, 0.05, 0.2, 0.6, 0.1])),
        frame=FRAME,
        coupled=table.couple_cfg,
        max_chain=table.max_chain,
        layer=int(rng.integers(table.layers)),
        prefetch=table.prefetch,
        held=None if rng.random() < 0.5 else int(rng.integers(table.layers)),
    )
    return table, situation


def test_ten_thousand_random_calls(controller: Controller) -> None:
    rng = np.random.default_rng(5)
    tables = []
    for rows in range(1, 33):
        for _ in range(3):
            layers = int(rng.integers(1, 5))
            tables.append(
                table_for(
                    *(rows, int(rng.integers(1, LIMITS.cores + 1)), layers),
                    couple_cfg=bool(rows % 2 == 0 and rng.random() < 0.5),
                    max_chain=None if rng.random() < 0.5 else int(rng.integers(1, 4)),
                    prefetch=[int(v) for v in rng.choice([0, 4096, 2**32 - 1], layers)],
                )
            )
    seen: set[int] = set()
    for _ in range(RANDOM_CALLS):
        table, s = random_situation(rng, tables)
        query = numbers([1.0 if wants else -1.0 for wants in s.wants])
        call = LayerCall(s.layer, s.step, query, np.abs(query), np.array(s.chain, np.int32), s.held)
        trace = controller.agreed(table, call)
        assert_is(trace, schedule(s))
        seen.add(table.rows)
    assert seen == set(range(1, 33))


def test_what_is_dispatched() -> None:
    trace = simulate(build_table(2, 4, 2, 64, [0.5, float("inf")]), 1, 0b1101)
    assert trace.mapping == ((0, 0), (0, 0), (1, 0), (0, 1))
    assert trace.records == (
        DispatchRecord(Opcode.LOAD_WEIGHTS, None, None),
        DispatchRecord(Opcode.COMPUTE_MLP, 0, 0, 0),
        DispatchRecord(Opcode.COMPUTE_MLP, 2, 1, 0),
        DispatchRecord(Opcode.COMPUTE_MLP, 3, 0, 1),
        DispatchRecord(Opcode.REPLAY_COPY, 1, None),
        DispatchRecord(Opcode.BARRIER, None, None),
    )


def test_a_skipped_layer_loads_nothing() -> None:
    trace = simulate(table_for(2), 0, 0b100)  # bits beyond the rows are ignored
    assert [r.opcode for r in trace.records] == [Opcode.REPLAY_COPY, Opcode.REPLAY_COPY, Opcode.BARRIER]


@given(register=st.integers(0, 2**32 - 1), rows=st.integers(1, 32), cores=st.integers(1, 32))
def test_cores_are_filled_evenly(register: int, rows: int, cores: int) -> None:
    mapping = map_rows(register, rows, cores)
    used = [mapping[row] for row in range(rows) if register >> row & 1]
    assert used == [(i % cores, i // cores) for i in range(len(used))]


@pytest.mark.parametrize("capacity", range(7))
def test_a_full_queue_is_reported_and_changes_nothing(controller: Controller, capacity: int) -> None:
    """Two rows compute, one replays: five records."""
    table = table_for(prefetch=[64] * 3)
    trace = controller.agreed(table, call_for(0b011, layer=1, held=1), capacity)
    assert len(trace.records) == min(capacity, 5)
    if capacity < 5:
        assert (trace.status, trace.held) == (Status.QUEUE_FULL, 1)
    else:
        assert (trace.status, trace.held) == (Status.OK, None)


def test_the_first_frame_computes_whatever_the_score(controller: Controller) -> None:
    for step in (0, 1, FRAME - 1):
        trace = controller.agreed(table_for(), call_for(0, step=step, chain=[3, 2, 1]))
        assert (trace.index_register, trace.chain) == (0b111, (0, 0, 0))
        assert trace.scores == (1.0, 1.0, 1.0)
    assert controller.agreed(table_for(), call_for(0, step=FRAME)).index_register == 0


@pytest.mark.parametrize(
    ("threshold", "register"),
    [(float("inf"), 0b111), (-float("inf"), 0), (float("nan"), 0b111), (1.0, 0b010), (1.0000001, 0b111)],
)
def test_thresholds(controller: Controller, threshold: float, register: int) -> None:
    """Row 1 scores -1, the others 1; +inf never passes, -inf always does."""
    table = table_for().with_thresholds([threshold] * 3)
    assert controller.agreed(table, call_for(0b010)).index_register == register


def test_chain_counts_follow_the_limit(controller: Controller) -> None:
    """A row replays max_chain times, computes once, and so on; each row by itself."""
    table, chain = table_for(max_chain=2), np.array([0, 1, 0], np.int32)
    history = []
    for _ in range(6):
        trace = controller.agreed(table, call_for(0b100, chain=chain.tolist()))
        history.append(trace.index_register)
        chain = np.array(trace.chain, np.int32)
    assert history == [0b100, 0b110, 0b101, 0b100, 0b110, 0b101]


def test_a_layer_without_a_gate_computes_and_reads_no_operands(controller: Controller) -> None:
    table = table_for(scales=[1.0, None, 1.0])
    empty = np.zeros((0, 4), np.float32)
    call = dataclasses.replace(call_for(0, layer=1), query=empty, key=empty)
    trace = controller.agreed(table, call)
    assert (trace.status, trace.index_register, trace.scores) == (Status.OK, 0b111, (0.0, 0.0, 0.0))
    refused = controller.agreed(table, dataclasses.replace(call, layer=0))
    assert (refused.status, refused.records) == (Status.BAD_OPERANDS, ())
