"""The closing sum of every parallel block in one form, as in a sequential block."""

from functools import partial, reduce

import torch
from torch import fx

from fastcar_compile.ir.dataflow import ancestors, in_order
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.rewrite import before
from fastcar_compile.passes.find_sites import ParallelSum, parallel_sum, parallel_windows

aten = torch.ops.aten


class ParallelBlocks(Pass):
    """Write the closing sum of every parallel block (Phi, GPT-NeoX, Cohere, Falcon) in one form, in both graphs.

    1. Matches a sum of a layer's entry, its attention and an MLP that does not read the attention, in any order and
       association: `(attention + mlp) + entry` as well as `entry + (mlp + attention)`.
    2. Makes `residual = entry + attention` and `residual + mlp`, as in a sequential block. So whatever follows knows
       one form of a layer. Another association moves the sum by at most two float32 roundings.
    3. Moves an MLP that stands in front of its attention behind it: replay decides with the attention's query and keys.
    """

    name = "parallel-blocks"
    reason = "A block whose attention and MLP read the same input is summed in one form: (entry + attention) + MLP."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a block to rewrite."""
        return any([_canonical_sums(module.graph) for module in program.graphs()])


def _canonical_sums(graph: fx.Graph) -> bool:
    modified = False
    for window in parallel_windows(graph):
        if (found := parallel_sum(window)) is None:
            continue
        canonical = found.is_canonical()
        root = found.root if canonical else _reassociate(graph, found)
        early = _early(graph, found)
        # In graph order, in front of the sum: each moved node still stands behind what it reads.
        for node in early:
            root.prepend(node)
        modified |= bool(early) or not canonical
    return modified


def _reassociate(graph: fx.Graph, found: ParallelSum) -> fx.Node:
    """Replace the sum by (entry + attention) + MLP."""
    with before(found.root, ParallelBlocks.name) as emit:
        add = partial(emit, aten.add.Tensor)
        attention, mlp = reduce(add, found.attention), reduce(add, found.mlp)
        # The inner sum is the one that find-sites marks as the residual.
        leave = add(add(found.entry, attention), mlp)
    found.root.replace_all_uses_with(leave)
    graph.eliminate_dead_code()
    return leave


def _early(graph: fx.Graph, found: ParallelSum) -> list[fx.Node]:
    """The MLP's own operators in front of the attention, if nothing else reads what they make."""
    # A norm that attention reads as well stays in front of attention.
    shared = ancestors(found.origin, until={found.entry})
    own = {n for n in ancestors(*found.mlp, until={found.entry}) - shared if n.op == "call_function"}
    early = [n for n in in_order(graph, own) if n < found.origin]
    closed = all(user in own or user not in shared for node in early for user in node.users)
    return in_order(graph, own) if early and closed else []
