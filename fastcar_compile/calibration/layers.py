"""The prefill graph cut into stages: one per decoder layer, then the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.errors import InternalError
from fastcar_compile.ir.program import get_attribute
from fastcar_compile.ir.rewrite import ancestors, descendants, in_order, is_op, node_arg, output_nodes
from fastcar_compile.passes.find_sites import mlp_region

fastcar = torch.ops.fastcar
Replace = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query, written key cache, MLP input, MLP output) -> the value for the residual add in place of the MLP output."""

Attend = Callable[..., Tensor]
"""(query, key cache, value cache, position, scale) -> result, like `fastcar::attention`."""


@dataclass(frozen=True)
class Layer:
    """The nodes of one layer that replay reads and replaces."""

    query: fx.Node
    key_cache: fx.Node
    x: fx.Node
    output: fx.Node
    exit: fx.Node
    scale: float


class Stages:
    """The graph in stages. A change in one layer recomputes only that layer and the later ones.

    Attributes:
        layers: in order. Stage i computes layer i (stage 0 also what precedes it), and the last stage the head.
        crossing: for each stage, the nodes whose values later stages read.
        results: output name -> node.
        constants: `get_attr` node -> its value.
    """

    def __init__(self, module: fx.GraphModule, outputs: list[str], attend: Attend | None = None) -> None:
        self._attend = attend or torch.ops.fastcar.attention.default
        self.layers = _layers(module.graph)
        rank = dict.fromkeys(module.graph.nodes, 0)
        for number, layer in enumerate(self.layers, 1):
            for node in descendants(layer.exit) - {layer.exit}:
                rank[node] = number
        self.nodes: list[list[fx.Node]] = [[] for _ in range(len(self.layers) + 1)]
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.nodes[rank[node]].append(node)
        self.results = dict(zip(outputs, output_nodes(module.graph), strict=True))
        self.crossing = [[n for n in part if any(rank[u] > s for u in n.users)] for s, part in enumerate(self.nodes)]
        attributes = [n for n in module.graph.nodes if n.op == "get_attr"]
        self.constants = {n: get_attribute(module, str(n.target)) for n in attributes}

    def run(self, stage: int, values: Mapping[fx.Node, Any], replace: Replace | None) -> dict[fx.Node, Any]:
        """Return the values of all nodes of one stage.

        Args:
            values: of placeholders, and of the crossing nodes of earlier stages.
            replace: called on the layer's MLP output; None keeps it.
        """
        known: dict[fx.Node, Any] = {**self.constants, **values}
        layer = self.layers[stage] if stage < len(self.layers) else None
        for node in self.nodes[stage]:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: known[n])
            target = self._attend if is_op(node, torch.ops.fastcar.attention) else node.target
            assert callable(target)  # only call_function nodes are in a stage
            known[node] = target(*args, **kwargs)
            if replace is not None and layer is not None and node is layer.output:
                known[node] = replace(*(known[n] for n in (layer.query, layer.key_cache, layer.x, layer.output)))
        return known


def _layers(graph: fx.Graph) -> list[Layer]:
    attentions = [n for n in graph.nodes if is_op(n, fastcar.attention, fastcar.window_attention)]
    layers = []
    for index, attention in enumerate(attentions):
        residual, output, closing = mlp_region(graph, index, attentions)
        region = in_order(graph, (descendants(residual) & ancestors(output)) - {residual})
        linears = [n for n in region if _is_linear(n)]
        if not linears:
            raise InternalError(f"the MLP of layer {index} has no linear in the prefill graph")
        query, keys, scale = node_arg(attention, 0), node_arg(attention, 1), float(attention.args[4])
        layers.append(Layer(query, keys, node_arg(linears[0], 0), output, closing, scale))
    return layers


def _is_linear(node: fx.Node) -> bool:
    """Return whether a node is a linear of any precision: aten.linear, fastcar.linear_w8a8, …"""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and packet.__name__.startswith("linear")
