"""Three readers of one table: HLS controller in C simulation, Python simulator, an oracle written from the design."""

import dataclasses

import numpy as np
import pytest

from drs.oracle import Answer, Situation, decide
from drs.tables import FRAME, LATER, Controller, call_for, numbers, table_for
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, LayerTrace
from fastcar_compile.codegen.hls.control_table.table import DrsTable, TableStatus

RANDOM_CALLS = 1_000


def assert_is(trace: LayerTrace, answer: Answer) -> None:
    """The controller's answer is the oracle's."""
    assert trace.status is TableStatus.OK
    assert trace.index_register == sum(1 << row for row, computes in enumerate(answer.computes) if computes)
    assert list(trace.chain) == answer.chain


def random_situation(rng: np.random.Generator, tables: list[DrsTable]) -> tuple[DrsTable, Situation]:
    """Half of the rows or nearly none or nearly all replay; step and chain as they come."""
    table = tables[rng.integers(len(tables))]
    rows = table.rows
    share = rng.choice([0.02, 0.5, 0.98, 1.0])
    situation = Situation(
        wants=[bool(w) for w in rng.random(rows) < share],
        chain=rng.integers(0, 4, rows).tolist(),
        step=int(rng.choice([0, FRAME - 1, FRAME, LATER, 2**32 - 1], p=[0.05, 0.05, 0.2, 0.6, 0.1])),
        frame=FRAME,
        coupled=table.couple_cfg,
        max_chain=table.max_chain,
        period=table.refresh_period,
    )
    return table, situation


def test_random_calls(controller: Controller) -> None:
    rng = np.random.default_rng(5)
    tables = []
    for rows in range(1, 33):
        for _ in range(3):
            layers = int(rng.integers(1, 5))
            tables.append(
                table_for(
                    *(rows, 2, layers),
                    couple_cfg=bool(rows % 2 == 0 and rng.random() < 0.5),
                    max_chain=None if rng.random() < 0.5 else int(rng.integers(1, 4)),
                    refresh_every=None if rng.random() < 0.5 else int(rng.integers(1, 4)),
                )
            )
    seen: set[int] = set()
    for _ in range(RANDOM_CALLS):
        table, s = random_situation(rng, tables)
        query = numbers([1.0 if wants else -1.0 for wants in s.wants])
        layer = int(rng.integers(table.layers))
        trace = controller.agreed(table, LayerCall(layer, s.step, query, np.abs(query), np.array(s.chain, np.int32)))
        assert_is(trace, decide(s))
        seen.add(table.rows)
    assert seen == set(range(1, 33))


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
    assert (trace.status, trace.index_register, trace.scores) == (TableStatus.OK, 0b111, (0.0, 0.0, 0.0))
    refused = controller.agreed(table, dataclasses.replace(call, layer=0))
    assert refused == LayerTrace(TableStatus.BAD_OPERANDS)
