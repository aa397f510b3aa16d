"""The host graph of an accelerator: a quantised MLP becomes one call to it, with the replay decision of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, LayerSite
from fastcar_compile.ir.rewrite import call, is_op, node_named, placeholder

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class OffloadMlp(Pass):
    """Replace mlp_input -> MLP -> mlp_output of the decode step by `fastcar.offloaded_mlp`; prefill stays on the host.

    Inside a replay `cond` the call sits in the compute branch, so that the accelerator is not called when all rows
    replay, and gets the row mask otherwise.
    """

    name: ClassVar[str] = "offload-mlp"

    def apply(self, program: DecoderProgram) -> bool:
        """Layers whose linears are not quantised stay on the host."""
        return any([_offload(program.graph_module, site) for site in program.sites])


def _offload(module: fx.GraphModule, site: LayerSite) -> bool:
    owner = module.get_submodule(f"compute_branch_{site.layer}") if site.replay else module
    assert isinstance(owner, fx.GraphModule)
    graph = owner.graph
    names = {n.name for n in graph.nodes}
    if not set(site.linears) <= names:
        return False
    linears = [node_named(graph, n) for n in site.linears]
    if not all(is_op(n, fastcar.linear_w8a8, fastcar.linear_w4a8) for n in linears):
        return False
    output = linears[-1]
    with graph.inserting_before(output):
        new = _call(graph, site, linears[0].args[0], output)  # type: ignore[arg-type]
    output.replace_all_uses_with(new)
    graph.eliminate_dead_code()
    owner.recompile()
    return True


def _call(graph: fx.Graph, site: LayerSite, x: fx.Node, output: fx.Node) -> fx.Node:
    options = {"origin": output, "made_by": OffloadMlp.name}
    batch = int(x.meta["val"].shape[0])
    rows = call(graph, aten.view.default, (x, [batch, site.hidden]), **options)
    if site.replay:
        replay, cached = placeholder(graph, "replay"), placeholder(graph, "cached")
    else:
        replay = call(graph, aten.full.default, ([batch], False), dtype=torch.bool, **options)
        cached = call(graph, aten.full.default, ([batch, site.hidden], 0.0), dtype=torch.float32, **options)
    y = call(graph, fastcar.offloaded_mlp.default, (rows, replay, cached, site.layer), **options)
    return call(graph, aten.view.default, (y, list(output.meta["val"].shape)), **options)
