"""The host graph of an accelerator: score and gate of every layer become one call to its score unit."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fastcar_compile.gates import decided_on_accelerator
from fastcar_compile.ir.layers import Role, layer_of, replay_of, role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import argument_names, is_op, node_arg
from fastcar_compile.ir.rewrite import call, replace
from fastcar_compile.passes.patterns.caches import reads_earlier_key

fastcar = torch.ops.fastcar


class OffloadGate(Pass):
    """Let the accelerator decide which rows replay; prefill has no gate.

    1. Matches a gate that the controller has a unit for (`decided_on_accelerator`). Any other gate stays on the host,
       and its mask is the Index Register.
    2. Makes `replay, score, count = fastcar.offloaded_gate(query, key_cache, x, cached, counts of this slot, …)` with
       what the score reads; the others are None.
    3. The new chain counts are those of the accelerator.
    So the accelerator decides and the host follows: there is one decision, not two that have to agree. Thresholds, the
    limits on replay, the refresh and the weights of heads are in the accelerator's table; the graph keeps the input
    `thresholds`, unread. Networks of gate `learned` are in its memory.
    """

    name = "offload-gate"
    reason = "Score and gate of the layer are one call of the accelerator's TAS unit."

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
    """Return whether the controller computes this gate's score."""
    facts = replay_of(gate)
    return facts is not None and decided_on_accelerator(facts.gate)


def _offload(graph: fx.Graph, gate: fx.Node) -> None:
    score, step, chain = node_arg(gate, 0), node_arg(gate, 2), node_arg(gate, 3)
    # insert-replay counts with `slot_write(chain, (count + 1) * replay, step)`, the one write of these counters.
    (counted,) = (n for n in chain.users if is_op(n, fastcar.slot_write))
    with graph.inserting_before(gate):
        replay, new_score, new_chain = _call(graph, gate, score)
    # The gate goes before the score, which it reads: fx erases only nodes without users.
    replace(gate, replay)
    replace(score, new_score)
    counted.args = (chain, new_chain, step)


def _call(graph: fx.Graph, gate: fx.Node, score: fx.Node) -> list[fx.Node]:
    step, chain, made_by = node_arg(gate, 2), node_arg(gate, 3), OffloadGate.name
    given = dict(zip(argument_names(score), score.args, strict=False))
    operands = [given.get(name) for name in ("query", "key_cache", "x", "cached")]
    # A gate that reads no key has no position, and the unit reads no row: `step` fills the place.
    row = (given["position"], given["stride"]) if reads_earlier_key(score) else (step, 0)
    counts = call(graph, fastcar.slot_read.default, (chain, step), origin=gate, made_by=made_by)
    arguments = (*operands, counts, row[0], step, row[1], layer_of(gate))
    decided = call(graph, fastcar.offloaded_gate.default, arguments, origin=gate, made_by=made_by)
    return [call(graph, operator.getitem, (decided, i), origin=gate, made_by=made_by) for i in range(3)]
