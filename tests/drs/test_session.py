"""The controller decides a whole decode: the rewritten graph against the host graph with the gate in C simulation."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lowering.programs import FRAME, LAYERS, Case, program, tokens

from drs.tables import Controller, table_for
from fastcar_compile.codegen.hls.control import control_table, controller_part
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, DrsTable, table_words
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.errors import BackendError, CompileError, InternalError, UserError
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.gates.scores import score_factor
from fastcar_compile.ir.layers import Role, role_nodes
from fastcar_compile.ir.ops.offload import GateDecision, bound
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.offload import OffloadGate
from fastcar_compile.runtime.backends.accelerator.kernel import LiveTable
from fastcar_compile.runtime.backends.accelerator.step import GateController
from fastcar_compile.runtime.backends.eager import EagerStepper

FORWARDS = 3 * FRAME
CASES = [
    Case(batch=3, thresholds=(0.0, None, 0.5)),
    Case(batch=4, thresholds=(0.1, -0.2, 0.0), max_chain=2, couple_cfg=True),
]


def options_of(case: Case) -> CompileConfig:
    """What the case was compiled with, for a board."""
    replay = ReplayConfig(threshold=case.thresholds, max_chain=case.max_chain, couple_cfg=case.couple_cfg)
    sizes: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": case.length, "batch_size": case.batch}
    return CompileConfig(target="zcu102", quant="w8a8", replay=replay, **sizes)


def table_of(case: Case) -> DrsTable:
    """The control table that an artifact of the case holds."""
    return control_table(program(case), options_of(case), 2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These graphs are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def eager(source: DecoderProgram) -> EagerStepper:
    return EagerStepper(replace(source, prefill=None))


def thresholds_of(case: Case, shift: float = 0.0) -> np.ndarray:
    return np.array([np.inf if t is None else t + shift for t in case.thresholds], np.float32)


def gate_controller(controller: Controller, table: DrsTable) -> GateController:
    """A controller with this table."""
    controller.kernel.load(table.to_bytes())
    return GateController(controller.kernel, LiveTable(table.to_bytes()))


def asked(unit: GateController, layer: int, inputs: GateInputs[torch.Tensor], chain: torch.Tensor) -> GateDecision:
    """The unit's decision for a graph in eager PyTorch."""
    given = GateInputs(*(None if tensor is None else tensor.numpy() for tensor in vars(inputs).values()))
    return GateDecision(*map(torch.from_numpy, unit.decide(layer, given, chain.numpy())))


@pytest.mark.parametrize("case", CASES)
def test_the_table_is_that_of_the_program(case: Case) -> None:
    table, site = table_of(case), program(case).sites[0]
    assert (table.rows, table.cores, table.tokens_per_frame) == (case.batch, 2, FRAME)
    assert table.attention == AttentionShape(4, 2, 16)
    assert (table.max_chain, table.couple_cfg) == (case.max_chain, case.couple_cfg)
    assert table.thresholds == tuple(thresholds_of(case).tolist())
    factor = score_factor(site.attention.scale, 4)
    assert table.factors == tuple(0.0 if t is None else factor for t in case.thresholds)
    assert read_table(table.to_bytes()) == table
    summary = controller_part(table)
    assert summary.gated_layers == tuple(i for i, t in enumerate(case.thresholds) if t is not None)
    words = table_words(LAYERS)
    sizes = {"cores": 2, "rows": case.batch, "table_words": words, "query_words": 16, "key_words": 8}
    assert summary.limits.model_dump() == sizes | {"gate": "tas", "units": 1, "heads": 0}
    assert (summary.couple_cfg, summary.max_chain) == (case.couple_cfg, case.max_chain)
    assert summary.usage_estimate.dsp == 4 * 2 + 3 + 1


@pytest.mark.parametrize("case", CASES)
def test_decisions_scores_and_logits_are_those_of_the_rewritten_graph(controller: Controller, case: Case) -> None:
    """Bit for bit; in the second half with other thresholds."""
    host = run_pipeline(copy.deepcopy(program(case)), [OffloadGate()])
    reference, backend = eager(program(case)), eager(host)
    unit = gate_controller(controller, table_of(case))
    replayed = 0

    def decided(layer: int, inputs: GateInputs[torch.Tensor], chain: torch.Tensor, step: int) -> GateDecision:
        return asked(unit, layer, inputs, chain)

    for t, token in enumerate(tokens(case, FORWARDS)):
        thresholds = thresholds_of(case, 0.0 if t < FORWARDS // 2 else 0.3)
        expected = reference.decode(token, t, t, thresholds)
        unit.start(t, thresholds)
        with bound("gate", decided):
            actual = backend.decode(token, t, t, thresholds)
        for name in ("logits", "decisions", "scores"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        for layer in (n for n, t in enumerate(case.thresholds) if t is not None):
            computing = sum(1 << row for row in range(case.batch) if not expected.decisions[layer][row])
            unit.require(layer, computing)
            with pytest.raises(InternalError, match="the host's replay mask is not what the DRS controller decided"):
                unit.require(layer, computing ^ 1)
        replayed += int(expected.decisions.sum())
    assert 0 < replayed < (FORWARDS - FRAME) * LAYERS * case.batch


def test_thresholds_are_loaded_when_they_change(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each; a forward with those of the one before loads nothing."""
    kernel, loaded = controller.kernel, []
    load = kernel.load
    monkeypatch.setattr(kernel, "load", lambda table: loaded.append(read_table(table).thresholds) or load(table))
    unit = gate_controller(controller, table_for(1))
    one, none = np.ones((1, 1, 1), np.float32), np.zeros(1, np.int32)
    replays = []
    for threshold in (0.0, 0.0, 2.0, 2.0, 0.0):
        unit.start(64, np.full(3, threshold, np.float32))
        replays += [bool(unit.decide(layer, GateInputs(one, one), none)[0][0]) for layer in range(3)]
    assert loaded == [(0.0,) * 3, (2.0,) * 3, (0.0,) * 3]
    assert replays == [*[True] * 6, *[False] * 6, *[True] * 3]


def test_what_does_not_fit_the_table_is_reported(controller: Controller) -> None:
    unit = gate_controller(controller, table_for(2))
    unit.start(64, np.zeros(3, np.float32))
    inputs = GateInputs(np.ones((2, 8, 1), np.float32), np.ones((2, 1, 1), np.float32))
    with pytest.raises(BackendError, match=r"stopped with status BAD_OPERANDS\n  where: layer 1"):
        unit.decide(1, inputs, np.zeros(2, np.int32))
    with pytest.raises(UserError, match="the control table is not valid: BAD_CRC"):
        LiveTable(table_for(2).to_bytes()[:-1] + b"\x07")


def test_layers_of_different_attention_are_refused() -> None:
    case = CASES[0]
    source = copy.deepcopy(program(case))
    attention = role_nodes(source.graph_module)[2][Role.ATTENTION]
    graph, query = source.graph_module.graph, attention.args[0]
    with graph.inserting_before(attention):
        wider = graph.call_function(torch.ops.aten.cat.default, ([query, query], 1))
    wider.meta = dict(query.meta) | {"val": torch.cat([query.meta["val"]] * 2, 1)}  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    attention.replace_input_with(query, wider)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CompileError, match=r"the layers have different attention shapes: layer 0.*heads=4.*layer 2"):
        control_table(source, options_of(case), 2)
