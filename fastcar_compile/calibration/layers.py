"""The prefill graph cut into stages: one per decoder layer, then the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.ir.layers import Role, role_nodes, schedule
from fastcar_compile.ir.modules import get_attribute
from fastcar_compile.ir.query import is_op, node_arg, output_nodes
from fastcar_compile.ir.sites import attention_site, mlp_output

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
        self.layers = _layers(module)
        cut = schedule(module.graph)
        first, *later = cut.layers
        self.nodes = [[*cut.before, *first], *map(list, later), list(cut.behind)]
        rank = {node: stage for stage, part in enumerate(self.nodes) for node in part}
        self.results = dict(zip(outputs, output_nodes(module.graph), strict=True))
        self.crossing = [
            [n for n in part if any(rank.get(u, s) > s for u in n.users)] for s, part in enumerate(self.nodes)
        ]
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


def _layers(module: fx.GraphModule) -> list[Layer]:
    """Return where replay acts, by the roles that find-sites gave to the nodes."""
    layers: list[Layer] = []
    for nodes in role_nodes(module).values():
        attention, added, leave = nodes[Role.ATTENTION], mlp_output(nodes), nodes[Role.EXIT]
        query, keys, x = node_arg(attention, 0), node_arg(attention, 1), node_arg(nodes[Role.UP_PROJ], 0)
        layers.append(Layer(query, keys, x, added, leave, attention_site(attention).scale))
    return layers
