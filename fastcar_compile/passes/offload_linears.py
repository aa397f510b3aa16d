"""The host graph of an accelerator that also computes the projections and the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.rewrite import call, node_arg, node_named
from fastcar_compile.passes.patterns.linear_calls import LinearCall, linear_calls

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class OffloadLinears(Pass):
    """Replace the quantised linears of the decode step outside of the MLPs by `fastcar.offloaded_linear`.

    Linears that share their input, such as q, k and v, become one call. Prefill stays on the host.
    """

    name: ClassVar[str] = "offload-linears"

    def apply(self, program: DecoderProgram) -> bool:
        """Linears that are not quantised stay on the host; `linear_calls` has the reasons."""
        calls, _ = linear_calls(program)
        for item in calls:
            _offload(program.graph_module.graph, item)
        program.graph_module.graph.eliminate_dead_code()
        return bool(calls)


def _offload(graph: fx.Graph, item: LinearCall) -> None:
    linears = [node_named(graph, name) for name in item.nodes]
    x, options = node_arg(linears[0], 0), {"origin": linears[0], "made_by": OffloadLinears.name}
    batch, total = x.meta["val"].numel() // item.inputs, sum(item.channels)
    with graph.inserting_before(linears[0]):
        rows = call(graph, aten.reshape.default, (x, [batch, item.inputs]), **options)
        y = call(graph, fastcar.offloaded_linear.default, (rows, item.name, total), **options)
    start = 0
    for linear, channels in zip(linears, item.channels, strict=True):
        options["origin"] = linear
        with graph.inserting_before(linear):
            part = y
            if channels != total:
                part = call(graph, aten.slice.Tensor, (y, 1, start, start + channels), **options)
            shaped = call(graph, aten.reshape.default, (part, list(linear.meta["val"].shape)), **options)
        linear.replace_all_uses_with(shaped)
        graph.erase_node(linear)
        start += channels
