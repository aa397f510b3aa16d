"""The control table of a program, and the controller of a session, on the numpy simulator of the kernel."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from lowering.programs import FRAME, LAYERS, Case, program

from drs.tables import table_for
from fastcar_compile.codegen.hls.control import control_table, controller_part
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, LayerTrace, run_layer
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, table_words
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.errors import CompileError, InternalError, UserError
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.gates.scores import score_factor
from fastcar_compile.ir.layers import Role, role_nodes
from fastcar_compile.runtime.backends.accelerator.kernel import Kernel, LiveTable
from fastcar_compile.runtime.backends.accelerator.step import GateController

CASE = Case(batch=4, thresholds=(0.1, None, -0.2), max_chain=2, couple_cfg=True)


def options_of(case: Case) -> CompileConfig:
    """What the case was compiled with, for a board."""
    replay = ReplayConfig(threshold=case.thresholds, max_chain=case.max_chain, couple_cfg=case.couple_cfg)
    sizes: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": case.length, "batch_size": case.batch}
    return CompileConfig(target="zcu102", quant="w8a8", replay=replay, **sizes)


def thresholds_of(case: Case) -> np.ndarray:
    return np.array([np.inf if t is None else t for t in case.thresholds], np.float32)


class DecidingKernel(Kernel):
    """A kernel that decides by the simulator, and remembers the thresholds that it was given."""

    def __init__(self) -> None:
        self.loaded = list[tuple[float, ...]]()

    def load(self, table: bytes) -> None:
        self._table = table
        self.loaded.append(read_table(table).thresholds)

    def decide(self, call: LayerCall) -> LayerTrace:
        return run_layer(self._table, call)


def test_the_table_is_that_of_the_program() -> None:
    case = CASE
    table, site = control_table(program(case), options_of(case), 2), program(case).sites[0]
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


def test_thresholds_are_loaded_when_they_change() -> None:
    """Once each; a forward with those of the one before loads nothing. Another mask than the decided one is refused."""
    table, kernel = table_for(1).to_bytes(), DecidingKernel()
    kernel.load(table)
    unit, one, none = GateController(kernel, LiveTable(table)), np.ones((1, 1, 1), np.float32), np.zeros(1, np.int32)
    replays = []
    for threshold in (0.0, 0.0, 2.0, 2.0, 0.0):
        unit.start(64, np.full(3, threshold, np.float32))
        replays += [bool(unit.decide(layer, GateInputs(one, one), none)[0][0]) for layer in range(3)]
        unit.require(2, int(threshold > 0))
        with pytest.raises(InternalError, match="the host's replay mask is not what the DRS controller decided"):
            unit.require(2, int(threshold == 0))
    assert kernel.loaded == [(0.0,) * 3, (2.0,) * 3, (0.0,) * 3]
    assert replays == [*[True] * 6, *[False] * 6, *[True] * 3]


def test_a_table_that_is_not_valid_is_told() -> None:
    with pytest.raises(UserError, match="the control table is not valid: BAD_CRC"):
        LiveTable(table_for(2).to_bytes()[:-1] + b"\x07")


def test_layers_of_different_attention_are_refused() -> None:
    case = CASE
    source = copy.deepcopy(program(case))
    attention = role_nodes(source.graph_module)[2][Role.ATTENTION]
    graph, query = source.graph_module.graph, attention.args[0]
    with graph.inserting_before(attention):
        wider = graph.call_function(torch.ops.aten.cat.default, ([query, query], 1))
    wider.meta = dict(query.meta) | {"val": torch.cat([query.meta["val"]] * 2, 1)}  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    attention.replace_input_with(query, wider)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CompileError, match=r"the layers have different attention shapes: layer 0.*heads=4.*layer 2"):
        control_table(source, options_of(case), 2)
