"""Cut a decode step into prologue, layers and epilogue, so that each backend lowers identical layers once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fastcar_compile.codegen.part_graph import Part, branch_of, copy_part, part_key
from fastcar_compile.ir.program import LayerSite
from fastcar_compile.ir.rewrite import ancestors, descendants, output_nodes


@dataclass(frozen=True)
class Segment:
    """A part of the graph as a function.

    Attributes:
        part: its operators.
        key: equal for segments of equal structure.
        literals: the arguments that name a layer. They are arguments of the function too.
    """

    part: Part
    key: str
    literals: tuple[int | str, ...]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The outer graph's node (or, for parameters, attribute) that each placeholder stands for."""
        return self.part.inputs

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The outer graph's node behind each result."""
        return self.part.outputs

    def copy(self) -> fx.GraphModule:
        """Return the part as a graph of its own, which a backend may rewrite.

        Parameters, state and activations are placeholders, the results are a flat tuple, and nodes are named by
        position. A literal is replaced by its index in `literals`, as a number or as text.
        """
        return copy_part(self.part)


def segment(module: fx.GraphModule, sites: Sequence[LayerSite], state: Sequence[str]) -> list[Segment]:
    """Return prologue, one segment per layer, and epilogue.

    A node belongs to the last layer whose entry it depends on. Two corrections keep equal layers equal: a node that
    gathers results of several layers goes to the epilogue, and a layer reads its own state in the layer.

    Args:
        module: the decode step or the prefill chunk.
        sites: the layers.
        state: names of the state placeholders.
    """
    graph = module.graph
    borders = _borders(graph, sites)
    rank = _ranks(graph, borders)
    _gather_last(graph, borders, rank)
    _sink_state_reads(graph, state, rank)
    parts: list[list[fx.Node]] = [[] for _ in range(len(borders) + 1)]
    for node in graph.nodes:
        if node.op == "call_function":
            parts[rank[node]].append(node)
    results = set(output_nodes(graph))
    return [_extract(module, part, results) for part in parts if part]


def _borders(graph: fx.Graph, sites: Sequence[LayerSite]) -> list[fx.Node]:
    """Return the entry of the first layer and the exit of every layer.

    The prefill graph has its own node names. It is cut only where they agree with those of the decode step.
    """
    nodes = {n.name: n for n in graph.nodes}
    if not all(s.entry in nodes and s.exit in nodes for s in sites):
        return []
    return [nodes[name] for name in [sites[0].entry, *(s.exit for s in sites)]]


def _ranks(graph: fx.Graph, borders: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return for every node the number of the last border that it depends on; 0: none."""
    number = {border: i for i, border in enumerate(borders, 1)}
    rank: dict[fx.Node, int] = {}
    for node in graph.nodes:
        rank[node] = max((max(rank[a], number.get(a, 0)) for a in node.all_input_nodes), default=0)
    return rank


def _gather_last(graph: fx.Graph, borders: Sequence[fx.Node], rank: dict[fx.Node, int]) -> None:
    """Move nodes that read several layers' inner values, and that no layer needs, to the epilogue."""
    needed, ends = ancestors(*borders), set(borders)
    for node in graph.nodes:
        if node.op != "call_function" or node in needed:
            continue
        layers = {rank[a] for a in node.all_input_nodes if a not in ends} - {0}
        if len(layers) > 1 or len(borders) in layers:
            rank[node] = len(borders)


def _sink_state_reads(graph: fx.Graph, state: Sequence[str], rank: dict[fx.Node, int]) -> None:
    """Move nodes of the prologue that depend on state into the one layer that uses them."""
    names = set(state)
    reads = descendants(*(n for n in graph.nodes if n.op == "placeholder" and n.target in names))
    for node in reversed(graph.nodes):
        if node.op != "call_function" or rank[node] != 0 or node not in reads:
            continue
        users = {rank[u] for u in node.users}
        if len(users) == 1:
            rank[node] = users.pop()


def _extract(module: fx.GraphModule, nodes: list[fx.Node], results: set[fx.Node]) -> Segment:
    """Return the nodes of one part as a segment. Inputs are in the order of their first use, so equal parts agree."""
    inside = set(nodes)
    read: dict[fx.Node, None] = {}
    for node in nodes:
        read |= dict.fromkeys(a for a in node.all_input_nodes if a not in inside)
    branches = {n: b for n in read if (b := branch_of(module, n)) is not None}
    outputs = (n for n in nodes if n in results or any(u not in inside and u.op != "output" for u in n.users))
    part = Part(tuple(nodes), tuple(n for n in read if n not in branches), tuple(outputs), branches)
    key, literals = part_key(part)
    return Segment(part, key, tuple(literals))
