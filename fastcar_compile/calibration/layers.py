"""The prefill graph cut into stages: one per decoder layer, then the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.ir.layers import Role, role_nodes, schedule
from fastcar_compile.ir.modules import get_attribute
from fastcar_compile.ir.query import descendants, is_op, node_arg, output_nodes
from fastcar_compile.ir.sites import attention_site, mlp_output
from fastcar_compile.ops.cached import stored

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
        joined: for each layer's stage, the nodes of `body` that `tail` reads, and those of `crossing`.
        results: output name -> node.
        constants: `get_attr` node -> its value.
    """

    def __init__(
        self, module: fx.GraphModule, outputs: list[str], attend: Attend | None = None, in_place: bool = False
    ) -> None:
        """Cut the graph.

        Args:
            attend: replaces attention. in_place: `body` writes keys and values into the caches that it is given.
        """
        self._attend, self._in_place = attend or torch.ops.fastcar.attention.default, in_place
        self.layers = _layers(module)
        cut = schedule(module.graph)
        first, *later = cut.layers
        self.nodes = [[*cut.before, *first], *map(list, later), list(cut.behind)]
        rank = {node: stage for stage, part in enumerate(self.nodes) for node in part}
        self.results = dict(zip(outputs, output_nodes(module.graph), strict=True))
        self.crossing = [
            [n for n in part if any(rank.get(u, s) > s for u in n.users)] for s, part in enumerate(self.nodes)
        ]
        self._tails = [self._tail(part, layer) for part, layer in zip(self.nodes, self.layers, strict=False)]
        self.joined = [self._joined(stage) for stage in range(len(self.layers))]
        attributes = [n for n in module.graph.nodes if n.op == "get_attr"]
        self.constants = {n: get_attribute(module, str(n.target)) for n in attributes}

    @staticmethod
    def _tail(part: list[fx.Node], layer: Layer) -> list[fx.Node]:
        """Return the nodes of a layer that depend on its MLP's output, in order."""
        behind = descendants(layer.output) - {layer.output}
        return [node for node in part if node in behind]

    def _joined(self, stage: int) -> list[fx.Node]:
        tail = set(self._tails[stage])
        read = {a for node in tail for a in node.all_input_nodes} | set(self.crossing[stage])
        return [n for n in self.nodes[stage] if n in read and n not in tail]

    def run(self, stage: int, values: Mapping[fx.Node, Any], replace: Replace | None) -> dict[fx.Node, Any]:
        """Return the values of all nodes of one stage.

        Args:
            values: of placeholders, and of the crossing nodes of earlier stages.
            replace: called on the layer's MLP output; None keeps it.
        """
        known: dict[fx.Node, Any] = {**self.constants, **values}
        layer = self.layers[stage] if stage < len(self.layers) else None
        for node in self.nodes[stage]:
            self._compute(node, known)
            if replace is not None and layer is not None and node is layer.output:
                known[node] = replace(*(known[n] for n in (layer.query, layer.key_cache, layer.x, layer.output)))
        return known

    def body(self, stage: int, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Return the values of a layer's stage up to its MLP's output: those that no replay of this layer changes."""
        known: dict[fx.Node, Any] = {**self.constants, **values}
        tail = set(self._tails[stage])
        for node in self.nodes[stage]:
            if node not in tail:
                self._compute(node, known)
        return known

    def tail(self, stage: int, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Return the values of the rest of a layer's stage.

        Args:
            values: as `body` takes them, and those of `joined`, with the MLP's output.
        """
        known: dict[fx.Node, Any] = {**self.constants, **values}
        for node in self._tails[stage]:
            self._compute(node, known)
        return known

    def _compute(self, node: fx.Node, known: dict[fx.Node, Any]) -> None:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: known[n])
        known[node] = self._operator(node)(*args, **kwargs)

    def _operator(self, node: fx.Node) -> Callable[..., Any]:
        if is_op(node, fastcar.attention):
            return self._attend
        if self._in_place and is_op(node, fastcar.cache_write):
            return _write
        return cast("Callable[..., Any]", node.target)  # only call_function nodes are in a stage


def _write(cache: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """Return the cache itself after the write of `fastcar::cache_write`."""
    start = int(position)
    # Padding of the last chunk may reach beyond the cache.
    rows = max(0, min(value.shape[2], cache.shape[2] - start))
    cache[:, :, start : start + rows] = stored(value[:, :, :rows], cache.dtype)
    return cache


def _layers(module: fx.GraphModule) -> list[Layer]:
    """Return where replay acts, by the roles that find-sites gave to the nodes."""
    layers: list[Layer] = []
    for nodes in role_nodes(module).values():
        attention, added, leave = nodes[Role.ATTENTION], mlp_output(nodes), nodes[Role.EXIT]
        query, keys, x = node_arg(attention, 0), node_arg(attention, 1), node_arg(nodes[Role.UP_PROJ], 0)
        layers.append(Layer(query, keys, x, added, leave, attention_site(attention).scale))
    return layers
