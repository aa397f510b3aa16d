"""w8a8 and w4a8: every linear becomes an integer one, activations go through tables (docs/reference/numerics.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, get_attribute
from fastcar_compile.ir.rewrite import activation_of, attribute, call, is_op, node_arg
from fastcar_compile.ir.weights import LazyWeights, quantized
from fastcar_compile.ops.activations import FACTORS
from fastcar_compile.ops.quant import quantize_weight, quantize_weight_int4

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class WeightFormat:
    """How a quantisation stores a weight.

    Args:
        suffix: of the attribute that holds the integers; the scales' is `scale`.
        quantize: float32 [N, K] -> (integers, scales).
        linear: the operator (x, integers, scales, bias) -> y.
    """

    suffix: str
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    linear: Any


FORMATS = {
    "w8a8": WeightFormat("int8", quantize_weight, fastcar.linear_w8a8.default),
    "w4a8": WeightFormat("int4", quantize_weight_int4, fastcar.linear_w4a8.default),
}
"""Value of `quant` -> weight format."""


class _Quantize(Pass):
    """Every linear of both graphs, by the format that `name` ends in."""

    def apply(self, program: DecoderProgram) -> bool:
        """Weights that are no plain attribute (computed, or transposed in the graph) stay as they are."""
        modified = False
        for module in program.graphs():
            linears = _quantize_linears(module, self.name, program.lazy)
            renamed = {**linears, **_replace_activations(module, self.name)}
            module.graph.eliminate_dead_code()
            if module is program.graph_module:
                rename_sites(program, renamed)
            modified |= bool(renamed)
        return modified


@dataclass(frozen=True)
class QuantizeW8A8(_Quantize):
    """Symmetric int8 weights per output channel, dynamic int8 activations per row, in both graphs."""

    name: ClassVar[str] = "quantize-w8a8"


@dataclass(frozen=True)
class QuantizeW4A8(_Quantize):
    """Symmetric int4 weights in groups of 128 inputs, dynamic int8 activations per row, in both graphs."""

    name: ClassVar[str] = "quantize-w4a8"


def _quantize_linears(module: fx.GraphModule, made_by: str, lazy: LazyWeights | None) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for node in list(module.graph.nodes):
        if is_op(node, aten.linear) and node.args[1].op == "get_attr":
            renamed[node.name] = _quantize_linear(module, node, made_by, lazy).name
    return renamed


def _quantize_linear(module: fx.GraphModule, node: fx.Node, made_by: str, lazy: LazyWeights | None) -> fx.Node:
    graph, weight, kind = module.graph, node.args[1], FORMATS[made_by.removeprefix("quantize-")]
    target = str(weight.target)  # type: ignore[union-attr]
    value = get_attribute(module, target)
    assert isinstance(value, Tensor)
    names = (f"{target}_{kind.suffix}", f"{target}_scale")
    stored = dict(zip(names, quantized(kind.quantize, value), strict=True))
    if lazy is not None and value.is_meta:
        lazy.derive(names, target, kind.quantize)
    with graph.inserting_before(node):
        attributes = [attribute(module, n, t, node, made_by) for n, t in stored.items()]
        bias = node.args[2] if len(node.args) > 2 else None
        new = call(graph, kind.linear, (node_arg(node, 0), *attributes, bias), origin=node, made_by=made_by)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _replace_activations(module: fx.GraphModule, made_by: str) -> dict[str, str]:
    """act(x) -> x * activation_factor(x), for the activations that have a table."""
    renamed: dict[str, str] = {}
    for node in list(module.graph.nodes):
        activation = activation_of(node)
        if activation not in FACTORS:
            continue
        x = node_arg(node, 0)
        with module.graph.inserting_before(node):
            options = {"origin": node, "made_by": made_by}
            factor = call(module.graph, fastcar.activation_factor.default, (x, activation), **options)
            new = call(module.graph, aten.mul.Tensor, (x, factor), **options)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        renamed[node.name] = new.name
    return renamed


def rename_sites(program: DecoderProgram, renamed: Mapping[str, str]) -> None:
    """Let the sites follow nodes that were replaced: old name -> new name."""
    fields = ("query", "entry", "residual", "mlp_input", "mlp_output", "region_output", "exit")
    for i, site in enumerate(program.sites):
        changes = {f: renamed.get(getattr(site, f), getattr(site, f)) for f in fields}
        linears = tuple(renamed.get(n, n) for n in site.linears)
        program.sites[i] = dataclasses.replace(site, linears=linears, **changes)
