"""The host graph of an accelerator: a quantised MLP becomes one call to it, with the replay decision of each row."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.layers import Role, layer_of, mark, role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, node_arg, placeholder, shape_of
from fastcar_compile.ir.rewrite import Inserter, before
from fastcar_compile.ir.sites import QUANTISED_LINEARS

aten, fastcar = torch.ops.aten, torch.ops.fastcar
PROJECTIONS = (Role.GATE_PROJ, Role.UP_PROJ, Role.DOWN_PROJ)


class OffloadMlp(Pass):
    """Let the accelerator compute the MLPs of the decode step; prefill stays on the host.

    1. Matches a layer whose two or three projections are all quantised.
    2. Makes `fastcar.offloaded_mlp(x, replay, cached, layer)` of everything between their input and the last of them.
    3. Inside a replay `cond` the call stands in the compute branch and gets the mask of the rows, so that the
       accelerator is not called when all rows replay. Elsewhere no row replays.
    """

    name = "offload-mlp"
    reason = "The quantised MLP is one call of the accelerator, with the replay decision of every row."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was an MLP to offload."""
        layers = role_nodes(program.graph_module).values()
        found = [[nodes[role] for role in PROJECTIONS if role in nodes] for nodes in layers]
        chosen = [p for p in found if p and all(is_op(n, *QUANTISED_LINEARS) for n in p)]
        for first, *_, last in chosen:
            # The norm stays on the host: the call takes what the first projection reads.
            _offload(node_arg(first, 0), last)
        return bool(chosen)


def _offload(x: fx.Node, output: fx.Node) -> None:
    graph, shape = output.graph, list(shape_of(output))
    with before(output, OffloadMlp.name) as emit:
        rows = emit(aten.view.default, x, [shape[0], shape[-1]])
        y = emit(fastcar.offloaded_mlp.default, rows, *_replay(emit, shape[0], shape[-1]), layer_of(output))
        mark(y, layer_of(output), Role.MLP)
        output.replace_all_uses_with(emit(aten.view.default, y, shape))
    graph.eliminate_dead_code()
    # The graph may be that of a compute branch, and `run_pipeline` recompiles whole graphs only.
    if graph.owning_module is not None:
        graph.owning_module.recompile()


def _replay(emit: Inserter, batch: int, hidden: int) -> tuple[fx.Node, fx.Node]:
    """The decision and the cached rows: inputs of a compute branch; outside of one, no row replays."""
    if any(n.target == "replay" for n in emit.graph.find_nodes(op="placeholder")):
        return placeholder(emit.graph, "replay"), placeholder(emit.graph, "cached")
    replay = emit(aten.full.default, [batch], False, dtype=torch.bool)
    return replay, emit(aten.full.default, [batch, hidden], 0.0, dtype=torch.float32)
