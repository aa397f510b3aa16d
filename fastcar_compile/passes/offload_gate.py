"""The host graph of an accelerator: score and gate of every layer become one call to its score unit."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fastcar_compile.gates import decided_on_accelerator
from fastcar_compile.ir.layers import Role, layer_of, replay_of, role_of
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import argument_names, is_op, node_arg
from fastcar_compile.ir.rewrite import Inserter, before, replace, rewrite_each
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
        return rewrite_each([program.graph_module], _is_offloaded, _offload)


def _is_offloaded(node: fx.Node) -> bool:
    """Return whether the node is a gate whose score the controller computes."""
    facts = replay_of(node) if is_op(node, fastcar.gate) and role_of(node) == Role.GATE else None
    return facts is not None and decided_on_accelerator(facts.gate)


def _offload(_module: fx.GraphModule, gate: fx.Node) -> None:
    score, step, chain = node_arg(gate, 0), node_arg(gate, 2), node_arg(gate, 3)
    # insert-replay counts with `slot_write(chain, (count + 1) * replay, step)`, the one write of these counters.
    (counted,) = (n for n in chain.users if is_op(n, fastcar.slot_write))
    with before(gate, OffloadGate.name) as emit:
        replay, new_score, new_chain = _call(emit, gate, score)
    # The gate goes before the score, which it reads: fx erases only nodes without users.
    replace(gate, replay)
    replace(score, new_score)
    counted.args = (chain, new_chain, step)


def _call(emit: Inserter, gate: fx.Node, score: fx.Node) -> list[fx.Node]:
    step, chain = node_arg(gate, 2), node_arg(gate, 3)
    given = dict(zip(argument_names(score), score.args, strict=False))
    operands = [given.get(name) for name in ("query", "key_cache", "x", "cached")]
    # A gate that reads no key has no position, and the unit reads no row: `step` fills the place.
    position, stride = (given["position"], given["stride"]) if reads_earlier_key(score) else (step, 0)
    counts = emit(fastcar.slot_read.default, chain, step)
    decided = emit(fastcar.offloaded_gate.default, *operands, counts, position, step, stride, layer_of(gate))
    return [emit(operator.getitem, decided, i) for i in range(3)]
