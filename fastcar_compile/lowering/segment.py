"""Cut a decode step into prologue, layers and epilogue, so that identical layers are lowered once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fastcar_compile.graph_io import graph_to_json
from fastcar_compile.ir import LayerSite, get_attribute
from fastcar_compile.passes.edit import ancestors, descendants, node_named, output_nodes


@dataclass(frozen=True)
class Segment:
    """A part of the graph as a function.

    Attributes:
        module: fx graph with placeholders only (parameters, state and activations) and a flat tuple of results.
        inputs: the outer graph's node (or, for parameters, attribute) that each placeholder stands for.
        outputs: the outer graph's node behind each result.
        key: equal for segments of equal structure.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    key: str


def segment(module: fx.GraphModule, sites: Sequence[LayerSite], state: Sequence[str]) -> list[Segment]:
    """Prologue, one segment per layer, epilogue. `state` names the state placeholders.

    A node belongs to the last layer whose entry it depends on, with two corrections that keep equal layers equal: what
    gathers results of several layers goes to the epilogue, and a layer's own state is read in the layer.
    """
    graph = module.graph
    exits = [s.exit for s in sites]
    borders = [node_named(graph, n) for n in [sites[0].entry, *exits]] if _has(graph, sites) else []
    rank = _ranks(graph, borders)
    _gather_last(graph, borders, rank)
    _sink_state_reads(graph, state, rank)
    parts: list[list[fx.Node]] = [[] for _ in range(len(borders) + 1)]
    for node in graph.nodes:
        if node.op == "call_function":
            parts[rank[node]].append(node)
    return [_extract(module, part) for part in parts if part]


def _ranks(graph: fx.Graph, borders: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For every node the number of the last border that it depends on; 0: none."""
    number = {border: i for i, border in enumerate(borders, 1)}
    rank: dict[fx.Node, int] = {}
    for node in graph.nodes:
        rank[node] = max((max(rank[a], number.get(a, 0)) for a in node.all_input_nodes), default=0)
    return rank


def _gather_last(graph: fx.Graph, borders: Sequence[fx.Node], rank: dict[fx.Node, int]) -> None:
    """Move nodes that read several layers' inner values, and that no layer needs, to the epilogue."""
    needed = ancestors(*borders)
    for node in graph.nodes:
        layers = {rank[a] for a in node.all_input_nodes if a not in borders} - {0}
        if node.op == "call_function" and node not in needed and (len(layers) > 1 or len(borders) in layers):
            rank[node] = len(borders)


def _sink_state_reads(graph: fx.Graph, state: Sequence[str], rank: dict[fx.Node, int]) -> None:
    """Move nodes of the prologue that depend on state into the one layer that uses them."""
    names = set(state)
    reads = descendants(*(n for n in graph.nodes if n.op == "placeholder" and n.target in names))
    for node in reversed(graph.nodes):
        users = {rank[u] for u in node.users}
        if node.op == "call_function" and node in reads and rank[node] == 0 and len(users) == 1:
            rank[node] = users.pop()


def _has(graph: fx.Graph, sites: Sequence[LayerSite]) -> bool:
    """The prefill graph has its own node names; it is cut only where they agree."""
    names = {n.name for n in graph.nodes}
    return all(s.entry in names and s.exit in names for s in sites)


def _extract(module: fx.GraphModule, part: list[fx.Node]) -> Segment:
    inside = set(part)
    results = set(output_nodes(module.graph))
    inputs: dict[fx.Node, None] = {}
    for node in part:
        inputs |= dict.fromkeys(a for a in node.all_input_nodes if a not in inside and not _is_branch(module, a))
    outputs = [n for n in part if n in results or any(u not in inside and u.op != "output" for u in n.users)]
    extracted = _copy_part(module, part, list(inputs), outputs)
    return Segment(extracted, tuple(inputs), tuple(outputs), _key(extracted))


def _copy_part(
    module: fx.GraphModule, part: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]
) -> fx.GraphModule:
    """The part as a graph of its own, with names by position."""
    graph, root = fx.Graph(), torch.nn.Module()
    values: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        values[node] = graph.placeholder(f"in_{i}")
        values[node].meta["val"] = node.meta["val"]
    branches = [a for n in part for a in n.all_input_nodes if _is_branch(module, a)]
    for i, node in enumerate(dict.fromkeys(branches)):
        root.add_module(f"branch_{i}", _canonical(module.get_submodule(str(node.target))))
        values[node] = graph.get_attr(f"branch_{i}")
    for i, node in enumerate(part):
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
        values[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"n_{i}")
        values[node].meta = dict(node.meta)
    graph.output(tuple(values[n] for n in outputs))
    return fx.GraphModule(root, graph)


def _is_branch(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(get_attribute(module, str(node.target)), fx.GraphModule)


def _canonical(branch: torch.nn.Module) -> fx.GraphModule:
    """A branch with node names by position, so that equal branches compare equal."""
    assert isinstance(branch, fx.GraphModule)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(branch.graph.nodes):
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda n: values[n]))
            continue
        args = fx.node.map_arg(node.args, lambda n: values[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
        target = f"b_{i}" if node.op == "placeholder" else node.target
        values[node] = graph.create_node(node.op, target, args, kwargs, name=f"b_{i}")
        values[node].meta = dict(node.meta)
    return fx.GraphModule(torch.nn.Module(), graph)


def _key(module: fx.GraphModule) -> str:
    def strip(data: dict[str, object]) -> dict[str, object]:
        origin = ("source", "module", "made_by")
        nodes = [{k: v for k, v in n.items() if k not in origin} for n in data["nodes"]]  # type: ignore[union-attr,attr-defined]
        return {"nodes": nodes, "branches": {n: strip(b) for n, b in data["branches"].items()}}  # type: ignore[union-attr,attr-defined,arg-type]

    return json.dumps(strip(graph_to_json(module)), sort_keys=True)
