"""The host graph of an accelerator: TAS and gate of every layer become one call to its TAS unit."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, LayerSite
from fastcar_compile.ir.rewrite import call, is_op, node_arg, placeholder

fastcar = torch.ops.fastcar


@dataclass(frozen=True)
class OffloadGate(Pass):
    """Replace tas, gate and the new chain counts of the decode step by `fastcar.offloaded_gate`.

    So the accelerator decides and the host follows: there is one decision, not two that have to agree. The thresholds
    are in the accelerator's table; the graph keeps the input of that name, unread.
    """

    name: ClassVar[str] = "offload-gate"

    def apply(self, program: DecoderProgram) -> bool:
        """Only layers that may replay have a gate; one that the TAS unit does not have stays on the host."""
        modified = any([_offload(program.graph_module, site) for site in program.sites if site.replay])
        program.graph_module.graph.eliminate_dead_code()
        return modified


def _offload(module: fx.GraphModule, site: LayerSite) -> bool:
    chain = placeholder(module.graph, f"chain_count_{site.layer}")
    gates = [n for n in chain.users if is_op(n, fastcar.gate) and _unit_has(n)]
    if not gates:
        return False
    (gate,) = gates
    (counted,) = (n for n in chain.users if is_op(n, fastcar.slot_write))
    score, step = node_arg(gate, 0), node_arg(gate, 2)
    with module.graph.inserting_before(gate):
        replay, new_score, new_chain = _call(module.graph, gate, site.layer)
    gate.replace_all_uses_with(replay)
    score.replace_all_uses_with(new_score, delete_user_cb=lambda user: user is not gate)
    counted.args = (chain, new_chain, step)
    return True


def _unit_has(gate: fx.Node) -> bool:
    """TAS over all heads, without refresh."""
    return is_op(node_arg(gate, 0), fastcar.tas) and not any(gate.args[7:])


def _call(graph: fx.Graph, gate: fx.Node, layer: int) -> list[fx.Node]:
    tas, step, chain = node_arg(gate, 0), node_arg(gate, 2), node_arg(gate, 3)
    query, key_cache, position, stride, _scale = tas.args
    options = {"origin": gate, "made_by": OffloadGate.name}
    counts = call(graph, fastcar.slot_read.default, (chain, step), **options)
    arguments = (query, key_cache, counts, position, step, stride, layer)
    decided = call(graph, fastcar.offloaded_gate.default, arguments, **options)
    return [call(graph, operator.getitem, (decided, i), **options) for i in range(3)]
