"""The host graph of an accelerator: TAS and gate of every layer become one call to its TAS unit."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.ir.layers import Role, layer_of, role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, node_arg
from fastcar_compile.ir.rewrite import call, replace

fastcar = torch.ops.fastcar

REFRESH = 7
"""The place of `refresh_every` among the arguments of `fastcar.gate`."""

FIRST_ROW = 1 << 31
"""A stride beyond every position: the key cache's row is the first one."""


@dataclass(frozen=True)
class OffloadGate(Pass):
    """Let the accelerator decide which rows replay; prefill has no gate.

    1. Matches a gate whose score is TAS over all heads, the input's change or a network, without refresh.
    2. Makes `replay, score, count = fastcar.offloaded_gate(query, key_cache, counts of this slot, …)`.
    3. The new chain counts are those of the accelerator.
    So the accelerator decides and the host follows: there is one decision, not two that have to agree. The thresholds
    are in the accelerator's table; the graph keeps the input of that name, unread. Other gates stay on the host.
    A gate that reads the MLP's input gives x as the query of one head, and the cached x as a key cache of one row.
    """

    name: ClassVar[str] = "offload-gate"

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a gate to offload."""
        graph = program.graph_module.graph
        gates = [nodes[Role.GATE] for nodes in role_nodes(program.graph_module).values() if Role.GATE in nodes]
        found = [gate for gate in gates if is_op(gate, fastcar.gate) and _unit_has(gate)]
        for gate in found:
            _offload(graph, gate)
        graph.eliminate_dead_code()
        return bool(found)


def _unit_has(gate: fx.Node) -> bool:
    """Return whether the unit has the score, and the rule has no refresh."""
    scores = (fastcar.tas, fastcar.input_delta, fastcar.learned_score)
    return is_op(node_arg(gate, 0), *scores) and not any(gate.args[REFRESH : REFRESH + 1])


def _offload(graph: fx.Graph, gate: fx.Node) -> None:
    score, step, chain = node_arg(gate, 0), node_arg(gate, 2), node_arg(gate, 3)
    (counted,) = (n for n in chain.users if is_op(n, fastcar.slot_write))
    with graph.inserting_before(gate):
        replay, new_score, new_chain = _call(graph, gate, score)
    replace(gate, replay)
    replace(score, new_score)
    counted.args = (chain, new_chain, step)


def _call(graph: fx.Graph, gate: fx.Node, score: fx.Node) -> list[fx.Node]:
    step, chain, made_by = node_arg(gate, 2), node_arg(gate, 3), OffloadGate.name
    if is_op(score, fastcar.tas):
        query, key_cache, position, stride, _scale = score.args
    else:
        batch, width = node_arg(score, 0).meta["val"].shape
        view, shape = torch.ops.aten.view.default, [batch, 1, 1, width]
        query, key_cache = (
            call(graph, view, (node_arg(score, i), shape), origin=gate, made_by=made_by) for i in (0, 1)
        )
        position, stride = step, FIRST_ROW
    counts = call(graph, fastcar.slot_read.default, (chain, step), origin=gate, made_by=made_by)
    arguments = (query, key_cache, counts, position, step, stride, layer_of(gate))
    decided = call(graph, fastcar.offloaded_gate.default, arguments, origin=gate, made_by=made_by)
    return [call(graph, operator.getitem, (decided, i), origin=gate, made_by=made_by) for i in range(3)]
