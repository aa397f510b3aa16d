"""The conditional of one layer: replay what was cached, or compute the MLP."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fastcar_compile.ir.layers import LAYER, layer_of, mark
from fastcar_compile.ir.modules import graph_module
from fastcar_compile.ir.provenance import ORIGIN_KEYS
from fastcar_compile.ir.query import between, shape_of
from fastcar_compile.ir.rewrite import call, set_origin

aten = torch.ops.aten


@dataclass(frozen=True)
class ReplayCond:
    """What the conditional of one layer is made of.

    Attributes:
        entry: the value that the MLP region begins with, and that stays outside. output: the region's result.
        replay: bool [B], True where a row replays. cached: float32 [B, H].
        made_by: name of the pass.
    """

    entry: fx.Node
    output: fx.Node
    replay: fx.Node
    cached: fx.Node
    made_by: str

    def insert(self, module: fx.GraphModule) -> fx.Node:
        """Insert `cond(replay.all(), replay_branch, compute_branch, …)` and return its result, float32 [B, H].

        The region itself is copied into the compute branch; `erase_region` removes it from the graph.
        """
        graph, layer = module.graph, layer_of(self.output)
        constants = self._constants()
        # One row that computes runs the branch for all rows. The rows that replay take the cached value inside of it.
        every = call(graph, aten.all.default, (self.replay,), origin=self.output, made_by=self.made_by)
        branches = {"replay": self._replay_branch(constants), "compute": self._compute_branch(constants)}
        nodes: list[fx.Node] = []
        for kind, branch in branches.items():
            name = f"{kind}_branch_{layer}"
            module.add_submodule(name, branch)
            nodes.append(graph.get_attr(name))
            mark(nodes[-1], layer)
        # Both branches take the operands in this order: it is that of `_inputs`.
        operands = (self.entry, self.replay, self.cached, *constants)
        result = graph.call_function(torch.ops.higher_order.cond, (every, *nodes, operands))
        set_origin(result, self.output, self.made_by)
        # A `cond` yields a tuple, also of one value.
        result.meta["val"] = (self.cached.meta["val"],)
        return call(graph, operator.getitem, (result, 0), origin=self.output, made_by=self.made_by)

    def erase_region(self) -> None:
        """Remove the region from the graph, once nothing reads its result."""
        for node in reversed(self._region()):
            if not node.users:
                node.graph.erase_node(node)

    def _region(self) -> list[fx.Node]:
        return [n for n in between(self.entry, self.output) if n is not self.entry]

    def _constants(self) -> list[fx.Node]:
        """What the region reads besides its entry: parameters."""
        region = self._region()
        inside = {*region, self.entry}
        return sorted({a for n in region for a in n.all_input_nodes if a not in inside})

    def _inputs(self, graph: fx.Graph, constants: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        """The placeholders of a branch: outer node -> inner one."""
        weights = {f"weight_{i}": c for i, c in enumerate(constants)}
        named = {"hidden": self.entry, "replay": self.replay, "cached": self.cached, **weights}
        return {outer: _branch_input(graph, name, outer) for name, outer in named.items()}

    def _compute_branch(self, constants: Sequence[fx.Node]) -> fx.GraphModule:
        """where(replay, cached, MLP(hidden))."""
        graph = fx.Graph()
        values = self._inputs(graph, constants)
        replay, cached = values[self.replay], values[self.cached]
        for node in self._region():
            values[node] = graph.node_copy(node, lambda n: values[n])
        shape = list(shape_of(cached))
        rows = call(graph, aten.view.default, (values[self.output], shape), origin=self.output, made_by=self.made_by)
        mask = call(graph, aten.unsqueeze.default, (replay, 1), origin=self.output, made_by=self.made_by)
        y = call(graph, aten.where.self, (mask, cached, rows), origin=self.output, made_by=self.made_by)
        graph.output((y,))
        return graph_module(torch.nn.Module(), graph)

    def _replay_branch(self, constants: Sequence[fx.Node]) -> fx.GraphModule:
        """A copy of what was cached."""
        graph = fx.Graph()
        # The branch takes parameters that it does not read, because `cond` gives both branches the same operands. It
        # returns a copy, because an output of a branch must not alias an input.
        cached = self._inputs(graph, constants)[self.cached]
        graph.output((call(graph, aten.clone.default, (cached,), origin=self.output, made_by=self.made_by),))
        return graph_module(torch.nn.Module(), graph)


def _branch_input(graph: fx.Graph, name: str, outer: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = {k: outer.meta[k] for k in (*ORIGIN_KEYS, LAYER, "made_by", "val") if k in outer.meta}
    return node
