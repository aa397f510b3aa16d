"""offload-gate: TAS and gate become one call to the accelerator's unit, which decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastcar_compile.errors import BackendError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op
from fastcar_compile.ops.offload_gate import GateDecision, bound_gate_unit
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.offload_gate import OffloadGate
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import check_origins, check_truthful, everything, nodes_of
from .tiny import BATCH, FRAME, ROWS, TinyBlock, after, backend_of, decode, token_ids

fastcar = torch.ops.fastcar
INF = float("inf")
REPLAY = (*analysis_pipeline(), InsertReplay((1.5,), max_chain=2))


class Unit:
    """TAS and gate by the operators, with the threshold and limit of its own; keeps what it was called with."""

    def __init__(self, scale: float, threshold: float, max_chain: int = -1, couple: bool = False) -> None:
        self.scale, self.threshold, self.options = scale, threshold, (max_chain, couple)
        self.steps: list[tuple[int, int]] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, chain: Tensor, step: int) -> GateDecision:
        self.steps.append((layer, step))
        at = torch.zeros(1, dtype=torch.int64)
        score = fastcar.tas(query[:, :, None], key[:, :, None], at, 1, self.scale)
        limit, now = torch.tensor([self.threshold]), torch.tensor([step])
        replay = fastcar.gate(score, limit, now, chain.repeat(FRAME, 1), FRAME, *self.options)
        return GateDecision(replay, score, torch.where(replay, chain + 1, 0).to(torch.int32))


def test_second_application_changes_nothing() -> None:
    check_truthful(after(*REPLAY), OffloadGate())


def test_inserted_nodes_keep_their_source() -> None:
    assert check_origins(after(*REPLAY, OffloadGate()), "offload-gate") == 5


def test_a_decoder_without_replay_is_left_alone() -> None:
    program = after(*analysis_pipeline())
    before = everything(program)
    assert OffloadGate().apply(program) is False
    assert everything(program) == before


def test_every_layer_has_its_own_call() -> None:
    passes = (*analysis_pipeline(), InsertReplay((1.5, None, 0.5)), OffloadGate())
    program = after(*passes, blocks=(TinyBlock,) * 3)
    calls = [n for n in nodes_of(program) if is_op(n, fastcar.offloaded_gate)]
    assert [n.args[6] for n in calls] == [0, 2]
    assert not [n for n in nodes_of(program) if is_op(n, fastcar.tas, fastcar.gate)]


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("threshold", [INF, 0.0, -INF])
def test_decisions_scores_and_outputs_stay_the_same(threshold: float, coupled: bool) -> None:
    passes = (*analysis_pipeline(), InsertReplay((1.5,), 2, coupled))
    expected = decode(after(*passes), threshold)
    host = after(*passes, OffloadGate())
    unit = Unit(host.sites[0].attention.scale, threshold, 2, coupled)
    with bound_gate_unit(unit):
        actual = decode(host)  # the threshold that the graph is given is not read
    for a, e in zip(actual, expected, strict=True):
        for name in ("logits", "decisions", "scores"):
            np.testing.assert_array_equal(getattr(a, name), getattr(e, name))
    assert unit.steps == [(0, step) for step in range(ROWS)]


def test_chain_counts_are_those_that_the_unit_returns() -> None:
    host: DecoderProgram = after(*REPLAY, OffloadGate())
    backend, ids = backend_of(host), token_ids()
    counts = torch.tensor([[7, 9]], dtype=torch.int32).repeat(FRAME, 1)

    def unit(layer: int, query: Tensor, key: Tensor, chain: Tensor, step: int) -> GateDecision:
        return GateDecision(torch.zeros(BATCH, dtype=torch.bool), torch.zeros(BATCH), counts[step].clone())

    with bound_gate_unit(unit):
        for t in range(FRAME):
            backend.decode(ids[:, t : t + 1], t, t, np.full(1, INF, np.float32))
    assert torch.equal(backend._state["chain_count_0"], counts)


def test_without_a_unit_the_error_says_so() -> None:
    with pytest.raises(BackendError, match="an offloaded gate was reached, but no accelerator is bound"):
        decode(after(*REPLAY, OffloadGate()))
