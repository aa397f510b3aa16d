"""bf16: weights of every linear in bfloat16, activations and sums in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, get_attribute
from fastcar_compile.ir.rewrite import attribute, call, is_op, node_arg
from fastcar_compile.ir.weights import LazyWeights, quantized
from fastcar_compile.passes.quantize import rename_sites

aten, fastcar = torch.ops.aten, torch.ops.fastcar


def to_bfloat16(weight: Tensor) -> tuple[Tensor, ...]:
    """Rounded half to even; exact where the value was bfloat16 before."""
    return (weight.to(torch.bfloat16),)


@dataclass(frozen=True)
class Bfloat16Weights(Pass):
    """Every linear of both graphs becomes `fastcar.linear_bf16`; weights of a bfloat16 checkpoint keep their bits."""

    name: ClassVar[str] = "bfloat16-weights"

    def apply(self, program: DecoderProgram) -> bool:
        """Weights that are no plain attribute (computed, or transposed in the graph) stay as they are."""
        modified = False
        for module in program.graphs():
            linears = [n for n in module.graph.nodes if is_op(n, aten.linear) and n.args[1].op == "get_attr"]
            renamed = {node.name: _replace(module, node, program.lazy).name for node in linears}
            module.graph.eliminate_dead_code()
            if module is program.graph_module:
                rename_sites(program, renamed)
            modified |= bool(renamed)
        return modified


def _replace(module: fx.GraphModule, node: fx.Node, lazy: LazyWeights | None) -> fx.Node:
    target = str(node_arg(node, 1).target)
    value = get_attribute(module, target)
    assert isinstance(value, Tensor)
    name = f"{target}_bf16"
    if lazy is not None and value.is_meta:
        lazy.derive([name], target, to_bfloat16)
    with module.graph.inserting_before(node):
        weight = attribute(module, name, quantized(to_bfloat16, value)[0], node, Bfloat16Weights.name)
        bias = node.args[2] if len(node.args) > 2 else None
        arguments = (node_arg(node, 0), weight, bias)
        new = call(module.graph, fastcar.linear_bf16.default, arguments, origin=node, made_by=Bfloat16Weights.name)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)
    return new
