"""Cut a decode step into prologue, layers and epilogue, so that identical layers are lowered once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fastcar_compile.graph_io import graph_to_json
from fastcar_compile.ir import LayerSite, get_attribute
from fastcar_compile.passes.edit import descendants, node_named, output_nodes


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


def segment(module: fx.GraphModule, sites: Sequence[LayerSite]) -> list[Segment]:
    """Prologue, one segment per layer, epilogue. A node belongs to the last layer whose entry it depends on."""
    graph = module.graph
    exits = [s.exit for s in sites]
    borders = [node_named(graph, n) for n in [sites[0].entry, *exits]] if _has(graph, sites) else []
    rank: dict[fx.Node, int] = {}
    for number, border in enumerate(borders, 1):
        for node in descendants(border) - {border}:
            rank[node] = number
    parts: list[list[fx.Node]] = [[] for _ in range(len(borders) + 1)]
    for node in graph.nodes:
        if node.op == "call_function":
            parts[rank.get(node, 0)].append(node)
    return [_extract(module, part) for part in parts if part]


def _has(graph: fx.Graph, sites: Sequence[LayerSite]) -> bool:
    """The prefill graph has its own node names; it is cut only where they agree."""
    names = {n.name for n in graph.nodes}
    return all(s.entry in names and s.exit in names for s in sites)


def _extract(module: fx.GraphModule, part: list[fx.Node]) -> Segment:
    inside = set(part)
    results = set(output_nodes(module.graph))
    inputs: list[fx.Node] = []
    for node in part:
        inputs += [a for a in node.all_input_nodes if a not in inside and a not in inputs and not _is_branch(module, a)]
    outputs = [n for n in part if n in results or any(u not in inside and u.op != "output" for u in n.users)]
    graph, root = fx.Graph(), torch.nn.Module()
    values: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        values[node] = graph.placeholder(f"in_{i}")
        values[node].meta["val"] = node.meta["val"]
    for i, node in enumerate(part):
        for argument in node.all_input_nodes:
            if _is_branch(module, argument) and argument not in values:
                name = f"branch_{len([n for n in graph.nodes if n.op == 'get_attr'])}"
                root.add_module(name, _canonical(module.get_submodule(str(argument.target))))
                values[argument] = graph.get_attr(name)
        values[node] = graph.create_node(
            node.op,
            node.target,
            fx.node.map_arg(node.args, lambda n: values[n]),
            fx.node.map_arg(node.kwargs, lambda n: values[n]),
            name=f"n_{i}",
        )
        values[node].meta = dict(node.meta)
    graph.output(tuple(values[n] for n in outputs))
    extracted = fx.GraphModule(root, graph)
    return Segment(extracted, tuple(inputs), tuple(outputs), _key(extracted))


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
        nodes = [{k: v for k, v in n.items() if k not in ("source", "module", "made_by")} for n in data["nodes"]]  # type: ignore[union-attr,attr-defined]
        return {"nodes": nodes, "branches": {n: strip(b) for n, b in data["branches"].items()}}  # type: ignore[union-attr,attr-defined,arg-type]

    return json.dumps(strip(graph_to_json(module)), sort_keys=True)
