"""w8a8: every linear becomes an int8 linear, the MLP's SiLU becomes the table sigmoid (docs/architecture.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.ir import DecoderProgram, get_attribute
from fastcar_compile.ops.quant import quantize_weight
from fastcar_compile.passes.base import Pass
from fastcar_compile.passes.edit import call, fake_like, is_op, node_arg
from fastcar_compile.weights import LazyWeights, quantized

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class QuantizeW8A8(Pass):
    """Symmetric int8 weights per output channel, dynamic int8 activations per row, in both graphs."""

    name: ClassVar[str] = "quantize-w8a8"

    def apply(self, program: DecoderProgram) -> bool:
        """Weights that are no plain attribute (computed, or transposed in the graph) stay as they are."""
        modified = False
        for module in program.graphs():
            renamed = {**_quantize_linears(module, program.lazy), **_replace_silu(module)}
            module.graph.eliminate_dead_code()
            if module is program.graph_module:
                _rename_sites(program, renamed)
            modified |= bool(renamed)
        return modified


def _quantize_linears(module: fx.GraphModule, lazy: LazyWeights | None) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for node in list(module.graph.nodes):
        if is_op(node, aten.linear) and node.args[1].op == "get_attr":
            renamed[node.name] = _quantize_linear(module, node, lazy).name
    return renamed


def _quantize_linear(module: fx.GraphModule, node: fx.Node, lazy: LazyWeights | None) -> fx.Node:
    graph, weight = module.graph, node.args[1]
    target = str(weight.target)  # type: ignore[union-attr]
    value = get_attribute(module, target)
    assert isinstance(value, Tensor)
    stored, scale = quantized(quantize_weight, value)
    if lazy is not None and value.is_meta:
        lazy.derive((f"{target}_int8", f"{target}_scale"), target, quantize_weight)
    with graph.inserting_before(node):
        attributes = [_attribute(module, f"{target}_{n}", t, node) for n, t in (("int8", stored), ("scale", scale))]
        bias = node.args[2] if len(node.args) > 2 else None
        arguments = (node_arg(node, 0), *attributes, bias)
        new = call(graph, fastcar.linear_w8a8.default, arguments, origin=node, made_by=QuantizeW8A8.name)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _attribute(module: fx.GraphModule, target: str, value: Tensor, origin: fx.Node) -> fx.Node:
    path, _, leaf = target.rpartition(".")
    owner = module.get_submodule(path)
    if not hasattr(owner, leaf):
        owner.register_buffer(leaf, value)
    node = module.graph.get_attr(target)
    node.meta = {k: v for k, v in origin.meta.items() if k in ("nn_module_stack", "stack_trace")}
    node.meta |= {
        "made_by": QuantizeW8A8.name,
        "val": fake_like(module.graph, value),
    }
    return node


def _replace_silu(module: fx.GraphModule) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for node in list(module.graph.nodes):
        if not is_op(node, aten.silu):
            continue
        x = node.args[0]
        with module.graph.inserting_before(node):
            options = {"origin": node, "made_by": QuantizeW8A8.name}
            sigmoid = call(module.graph, fastcar.sigmoid_lut.default, (x,), **options)
            new = call(module.graph, aten.mul.Tensor, (x, sigmoid), **options)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        renamed[node.name] = new.name
    return renamed


def _rename_sites(program: DecoderProgram, renamed: Mapping[str, str]) -> None:
    fields = ("query", "entry", "residual", "mlp_input", "mlp_output", "region_output", "exit")
    for i, site in enumerate(program.sites):
        changes = {f: renamed.get(getattr(site, f), getattr(site, f)) for f in fields}
        linears = tuple(renamed.get(n, n) for n in site.linears)
        program.sites[i] = dataclasses.replace(site, linears=linears, **changes)
