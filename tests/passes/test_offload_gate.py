"""offload-gate: TAS and gate become one call to the accelerator's unit, which decides."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gates import foreign
from torch import Tensor

from fastcar_compile.gates.base import GateInputs
from fastcar_compile.ir.ops.offload import GateDecision, bound
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.offload import OffloadGate
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import check_left_alone, nodes_of
from .tiny import BATCH, FRAME, ROWS, TinyBlock, after, backend_of, decode, token_ids

fastcar = torch.ops.fastcar
INF = float("inf")
REPLAY = (*analysis_pipeline(), InsertReplay((1.5,), max_chain=2))


class Unit:
    """Score and gate by the operators, with the threshold and rules of its own; keeps what it was called with."""

    def __init__(self, gate: str, scale: float, threshold: float, *rules: int) -> None:
        self.gate, self.scale, self.threshold, self.rules = gate, scale, threshold, rules
        self.steps: list[tuple[int, int]] = []

    def __call__(self, layer: int, inputs: GateInputs[Tensor], chain: Tensor, step: int) -> GateDecision:
        self.steps.append((layer, step))
        score = SCORES[self.gate](inputs, self.scale, step)
        limit, now = torch.tensor([self.threshold]), torch.tensor([step])
        at_most = self.gate not in ("tas", "heads")
        replay = fastcar.gate(score, limit, now, chain.repeat(FRAME, 1), FRAME, *self.rules, at_most)
        return GateDecision(replay, score, torch.where(replay, chain + 1, 0).to(torch.int32))


HEADS = ((1, -0.5),)
AT = torch.zeros(1, dtype=torch.int64)


def heads_of(inputs: GateInputs[Tensor]) -> tuple[Tensor, Tensor]:
    """The query, and a key cache of one row."""
    assert inputs.query is not None
    assert inputs.key is not None
    return inputs.query[:, :, None], inputs.key[:, :, None]


SCORES: dict[str, Callable[[GateInputs[Tensor], float, int], Tensor]] = {
    "tas": lambda v, scale, _t: fastcar.tas(*heads_of(v), AT, 1, scale),
    "heads": lambda v, scale, _t: fastcar.tas_heads(*heads_of(v), AT, 1, scale, [1], [-0.5]),
    "input_delta": lambda v, _s, _t: fastcar.input_delta(v.x, v.cached),
}
READ = {"tas": "qk", "heads": "qk", "input_delta": "xc"}
"""What the unit is given: q and key, x and the cached x."""


def test_a_decoder_without_replay_is_left_alone() -> None:
    program = after(*analysis_pipeline())
    check_left_alone(program, OffloadGate())


def test_every_layer_has_its_own_call() -> None:
    passes = (*analysis_pipeline(), InsertReplay((1.5, None, 0.5)), OffloadGate())
    program = after(*passes, blocks=(TinyBlock,) * 3)
    calls = [n for n in nodes_of(program) if is_op(n, fastcar.offloaded_gate)]
    assert [n.args[8] for n in calls] == [0, 2]
    assert not [n for n in nodes_of(program) if is_op(n, fastcar.tas, fastcar.gate)]


@pytest.mark.parametrize("rules", [(2, False, 0), (2, True, 2)])
@pytest.mark.parametrize(("gate", "threshold"), [("tas", 0.0), ("tas", -INF), ("heads", 0.0), ("input_delta", 0.5)])
def test_decisions_scores_and_outputs_stay_the_same(gate: str, threshold: float, rules: tuple[int, bool, int]) -> None:
    max_chain, coupled, refresh = rules
    options: dict[str, Any] = {"gate": "tas", "heads": (HEADS,)} if gate == "heads" else {"gate": gate}
    passes = (*analysis_pipeline(), InsertReplay((1.5,), max_chain, coupled, refresh_every=refresh or None, **options))
    expected = decode(after(*passes), threshold)
    host = after(*passes, OffloadGate())
    (call,) = [n for n in nodes_of(host) if is_op(n, fastcar.offloaded_gate)]
    assert "".join(name for name, given in zip("qkxc", call.args, strict=False) if given is not None) == READ[gate]
    unit = Unit(gate, host.sites[0].attention.scale, threshold, *rules)
    with bound("gate", unit):
        actual = decode(host)  # the threshold that the graph is given is not read
    for a, e in zip(actual, expected, strict=True):
        for name in ("logits", "decisions", "scores"):
            np.testing.assert_array_equal(getattr(a, name), getattr(e, name))
    assert unit.steps == [(0, step) for step in range(ROWS)]


def test_chain_counts_are_those_that_the_unit_returns() -> None:
    host: DecoderProgram = after(*REPLAY, OffloadGate())
    backend, ids = backend_of(host), token_ids()
    counts = torch.tensor([[7, 9]], dtype=torch.int32).repeat(FRAME, 1)

    def unit(layer: int, inputs: GateInputs[Tensor], chain: Tensor, step: int) -> GateDecision:
        return GateDecision(torch.zeros(BATCH, dtype=torch.bool), torch.zeros(BATCH), counts[step].clone())

    with bound("gate", unit):
        for t in range(FRAME):
            backend.decode(ids[:, t : t + 1], t, t, np.full(1, INF, np.float32))
    assert torch.equal(backend._state["chain_count_0"], counts)


@pytest.mark.parametrize("gate", ["foreign", "random"])
def test_a_gate_without_a_unit_stays_on_the_host(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another package even where its score is an operator that the controller has."""
    foreign.register(monkeypatch)
    program = after(*analysis_pipeline(), InsertReplay((1.5,), gate=gate))
    check_left_alone(program, OffloadGate())
