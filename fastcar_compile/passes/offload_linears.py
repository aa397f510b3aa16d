"""The host graph of an accelerator that also computes the projections and the head."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import node_arg, node_named, shape_of, value_of
from fastcar_compile.ir.rewrite import before, replace_call
from fastcar_compile.passes.patterns.linear_calls import LinearCall, linear_calls

aten, fastcar = torch.ops.aten, torch.ops.fastcar


class OffloadLinears(Pass):
    """Let the accelerator compute the linears of the decode step outside of the MLPs; prefill stays on the host.

    1. Matches quantised linears with a row for each batch row; `linear_calls` says why others stay.
    2. Linears that share their input, such as q, k and v, become one `fastcar.offloaded_linear`, and slices of it.
    """

    name = "offload-linears"
    reason = "Linears that share their input are one call of the accelerator."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a linear to offload."""
        calls, _ = linear_calls(program)
        for item in calls:
            _offload(program.graph_module.graph, item)
        program.graph_module.graph.eliminate_dead_code()
        return bool(calls)


def _offload(graph: fx.Graph, item: LinearCall) -> None:
    linears = [node_named(graph, name) for name in item.nodes]
    x = node_arg(linears[0], 0)
    # T is 1 in a decode step, so the rows are those of the batch.
    batch, total = value_of(x).numel() // item.inputs, sum(item.channels)
    with before(linears[0], OffloadLinears.name) as emit:
        rows = emit(aten.reshape.default, x, [batch, item.inputs])
        y = emit(fastcar.offloaded_linear.default, rows, item.name, total)
    start = 0
    for linear, channels in zip(linears, item.channels, strict=True):
        # The call stands at the first linear. Each linear's own channels are sliced where the linear was.
        with before(linear, OffloadLinears.name) as emit:
            part = y if channels == total else emit(aten.slice.Tensor, y, 1, start, start + channels)
        replace_call(linear, OffloadLinears.name, aten.reshape.default, part, list(shape_of(linear)))
        start += channels
