"""The host graph of an accelerator: a quantised MLP becomes one call to it, with the replay decision of each row."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.layers import Role, layer_of, mark, role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, node_arg, placeholder, shape_of
from fastcar_compile.ir.rewrite import call
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
        found = [_projections(nodes) for nodes in role_nodes(program.graph_module).values()]
        chosen = [p for p in found if p and all(is_op(n, *QUANTISED_LINEARS) for n in p)]
        for projections in chosen:
            _offload(projections)
        return bool(chosen)


def _projections(nodes: dict[str, fx.Node]) -> list[fx.Node]:
    return [nodes[role] for role in PROJECTIONS if role in nodes]


def _offload(projections: list[fx.Node]) -> None:
    # The norm stays on the host: the call takes what the first projection reads.
    x, output = node_arg(projections[0], 0), projections[-1]
    graph = output.graph
    with graph.inserting_before(output):
        new = _call(graph, x, output)
    output.replace_all_uses_with(new)
    graph.eliminate_dead_code()
    # The graph may be that of a compute branch, and `run_pipeline` recompiles whole graphs only.
    if graph.owning_module is not None:
        graph.owning_module.recompile()


def _call(graph: fx.Graph, x: fx.Node, output: fx.Node) -> fx.Node:
    made_by = OffloadMlp.name
    shape = shape_of(output)
    batch, hidden = shape[0], shape[-1]
    rows = call(graph, aten.view.default, (x, [batch, hidden]), origin=output, made_by=made_by)
    replay, cached = _replay(graph, output, batch, hidden)
    arguments = (rows, replay, cached, layer_of(output))
    y = call(graph, fastcar.offloaded_mlp.default, arguments, origin=output, made_by=made_by)
    mark(y, layer_of(output), Role.MLP)
    return call(graph, aten.view.default, (y, list(shape)), origin=output, made_by=made_by)


def _replay(graph: fx.Graph, output: fx.Node, batch: int, hidden: int) -> tuple[fx.Node, fx.Node]:
    """The decision and the cached rows: inputs of a compute branch; outside of one, no row replays."""
    if any(n.target == "replay" for n in graph.find_nodes(op="placeholder")):
        return placeholder(graph, "replay"), placeholder(graph, "cached")
    full, made_by = aten.full.default, OffloadMlp.name
    return (
        call(graph, full, ([batch], False), origin=output, made_by=made_by, dtype=torch.bool),
        call(graph, full, ([batch, hidden], 0.0), origin=output, made_by=made_by, dtype=torch.float32),
    )
