"""What the host computes for an accelerator that runs whole decode steps: the rows that the first layer reads."""

from __future__ import annotations

from torch import fx

from fastcar_compile.artifact.offload import EMBEDDED
from fastcar_compile.codegen.tvm.build import HostGraph
from fastcar_compile.ir.modules import graph_module
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import ancestors, node_named
from fastcar_compile.ir.rewrite import set_outputs


def embedding_graph(program: DecoderProgram) -> HostGraph | None:
    """Return the part of the decode step that makes the input of the first layer; None: it is the decoder's own input.

    Args:
        program: rewritten; it is not changed.
    """
    module = program.graph_module
    entry = node_named(module.graph, program.sites[0].entry)
    if entry.op == "placeholder":
        return None
    needed, graph, made = ancestors(entry), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node in needed:
            # Only what leads to the entry is copied: the session gives this graph's inputs alone.
            made[node] = graph.node_copy(node, lambda old: made[old])
    graph.output(())
    set_outputs(graph, [made[entry]])
    return HostGraph(graph_module(module, graph), [EMBEDDED])
