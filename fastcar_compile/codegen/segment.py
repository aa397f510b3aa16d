"""Cut a decode step into prologue, layers and epilogue, so that each backend lowers identical layers once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.codegen.schema import index_of
from fastcar_compile.ir.layers import schedule
from fastcar_compile.ir.modules import get_attribute
from fastcar_compile.ir.query import output_nodes

fastcar = torch.ops.fastcar
_LITERALS = {
    operator: index_of(operator, name)
    for operator, name in (
        (fastcar.offloaded_gate.default, "layer"),
        (fastcar.offloaded_mlp.default, "layer"),
        (fastcar.offloaded_linear.default, "name"),
    )
}
"""Operator -> position of the argument that names its layer. Layers that differ in it alone are still equal."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Segment:
    """A part of the graph as a function.

    Attributes:
        inputs: the outer graph's node (or, for parameters, attribute) that each placeholder stands for.
        outputs: the outer graph's node behind each result.
        literals: the arguments that name a layer. They are arguments of the function too.
        key: equal for segments of equal structure.
        nodes: the operators of the part, in order.
        outer: the graph that they are in.
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    literals: tuple[int | str, ...]
    key: str
    nodes: tuple[fx.Node, ...]
    outer: fx.GraphModule

    def copy(self) -> fx.GraphModule:
        """Return the part as a graph of its own, which a backend may rewrite.

        Parameters, state and activations are placeholders, the results are a flat tuple, and nodes are named by
        position. A literal is replaced by its index in `literals`, as a number or as text.
        """
        return _copy_part(self)


def segment(module: fx.GraphModule) -> list[Segment]:
    """Return the part before the layers, one segment per layer, and the part behind them, as `schedule` cuts them."""
    stages = schedule(module.graph)
    results = set(output_nodes(module.graph))
    parts = [stages.before, *stages.layers, stages.behind]
    return [_extract(module, list(part), results) for part in parts if part]


def _extract(module: fx.GraphModule, part: list[fx.Node], results: set[fx.Node]) -> Segment:
    """Return the nodes of one part as a segment. Inputs are in the order of their first use, so equal parts agree."""
    inside = set(part)
    inputs: dict[fx.Node, None] = {}
    for node in part:
        inputs |= dict.fromkeys(a for a in node.all_input_nodes if a not in inside)
    branches = {n: b for n in inputs if (b := _branch(module, n)) is not None}
    outer = [n for n in inputs if n not in branches]
    outputs = [n for n in part if n in results or any(u not in inside and u.op != "output" for u in n.users)]
    literals: list[int | str] = []
    key = _key(part, outer, branches, outputs, literals)
    return Segment(tuple(outer), tuple(outputs), tuple(literals), key, tuple(part), module)


def _branch(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that the node stands for, if it is a branch of a `cond`."""
    value = get_attribute(module, str(node.target)) if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None


def _arguments(node: fx.Node, values: dict[fx.Node, Any], literals: list[int | str]) -> Arguments:
    """Return the node's arguments with nodes replaced by `values`, and move its literal to `literals`."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    at = _LITERALS.get(node.target)
    if at is not None:
        literal = args[at]
        args = (*args[:at], type(literal)(len(literals)), *args[at + 1 :])
        literals.append(literal)
    return args, kwargs


def _copy_part(part: Segment) -> fx.GraphModule:
    graph, root = fx.Graph(), torch.nn.Module()
    values: dict[fx.Node, fx.Node] = {}
    literals: list[int | str] = []
    for i, node in enumerate(part.inputs):
        values[node] = graph.placeholder(f"in_{i}")
        values[node].meta["val"] = node.meta["val"]
    sources = dict.fromkeys(a for n in part.nodes for a in n.all_input_nodes)
    branches = {n: b for n in sources if (b := _branch(part.outer, n)) is not None}
    for i, (node, branch) in enumerate(branches.items()):
        root.add_module(f"branch_{i}", _copy_branch(branch, literals))
        values[node] = graph.get_attr(f"branch_{i}")
    for i, node in enumerate(part.nodes):
        args, kwargs = _arguments(node, values, literals)
        values[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"n_{i}")
        values[node].meta = dict(node.meta)
    graph.output(tuple(values[n] for n in part.outputs))
    return fx.GraphModule(root, graph)


def _copy_branch(branch: fx.GraphModule, literals: list[int | str]) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(branch.graph.nodes):
        args, kwargs = _arguments(node, values, literals)
        if node.op == "output":
            graph.output(args[0])
            continue
        target = f"b_{i}" if node.op == "placeholder" else node.target
        values[node] = graph.create_node(node.op, target, args, kwargs, name=f"b_{i}")
        values[node].meta = dict(node.meta)
    return fx.GraphModule(torch.nn.Module(), graph)


def _key(
    part: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    branches: dict[fx.Node, fx.GraphModule],
    outputs: Sequence[fx.Node],
    literals: list[int | str],
) -> str:
    """Return what `_copy_part` would make, as text: a copy of every layer takes longer than lowering one."""
    values: dict[fx.Node, Any] = {n: ("in", i) for i, n in enumerate(inputs)}
    lines = [f"{n.op == 'get_attr'} {_type(n)}" for n in inputs]
    for i, (node, branch) in enumerate(branches.items()):
        values[node] = ("branch", i)
        lines += ["branch", *_lines(branch.graph.nodes, {}, literals)]
    lines += ["nodes", *_lines(part, values, literals), str([values[n] for n in outputs])]
    return "\n".join(lines)


def _lines(nodes: Iterable[fx.Node], values: dict[fx.Node, Any], literals: list[int | str]) -> list[str]:
    """Return a line per node; nodes are named by position."""
    lines = []
    for i, node in enumerate(nodes):
        target = node.op if node.op in ("placeholder", "output") else node.target
        lines.append(f"{target} {_arguments(node, values, literals)} {_type(node)}")
        values[node] = ("node", i)
    return lines


def _type(node: fx.Node) -> str:
    val = node.meta.get("val")
    return f"{val.dtype} {tuple(val.shape)}" if isinstance(val, Tensor) else ""
