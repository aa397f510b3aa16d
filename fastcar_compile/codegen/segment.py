"""Cut a decode step into prologue, layers and epilogue, so that each backend lowers identical layers once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import Target, map_arg

from fastcar_compile.ir.layers import schedule
from fastcar_compile.ir.query import get_attribute, index_of, output_nodes

fastcar = torch.ops.fastcar


_LITERALS: dict[Target, int] = {
    operator: index_of(operator, name)
    for operator, name in (
        (fastcar.offloaded_gate.default, "layer"),
        (fastcar.offloaded_mlp.default, "layer"),
        (fastcar.offloaded_linear.default, "name"),
    )
}
"""Operator -> position of the argument that names its layer. Layers that differ in it alone are still equal."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Branches = Mapping[fx.Node, fx.GraphModule]


def branch_of(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that the node stands for, if it is a branch of a `cond`."""
    value = get_attribute(module, str(node.target)) if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None


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


def _arguments(node: fx.Node, values: Mapping[fx.Node, Any], literals: list[int | str]) -> Arguments:
    """Return the node's arguments with nodes replaced by `values`, and move its literal to `literals`."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    at = _LITERALS.get(node.target)
    if at is not None:
        literal = cast("int | str", args[at])  # _LITERALS names where such a literal stands
        args = (*args[:at], type(literal)(len(literals)), *args[at + 1 :])
        literals.append(literal)
    return args, kwargs


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


@dataclass(frozen=True)
class Segment:
    """A part of the graph as a function: operators in order, with what they read and what is read of them.

    Attributes:
        nodes: the operators.
        inputs: the outer graph's node (or, for parameters, attribute) that each placeholder stands for.
        outputs: the outer graph's node behind each result.
        branches: of their `cond`s, by the node that stands for each.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    branches: Branches

    @cached_property
    def _text(self) -> tuple[str, tuple[int | str, ...]]:
        """What `copy` would make as text, and the literals. It is made in less time than a copy of every layer."""
        literals: list[int | str] = []
        values: dict[fx.Node, Any] = {n: ("in", i) for i, n in enumerate(self.inputs)}
        lines = [f"{n.op == 'get_attr'} {_type(n)}" for n in self.inputs]
        for i, (node, branch) in enumerate(self.branches.items()):
            values[node] = ("branch", i)
            lines += ["branch", *_lines(branch.graph.nodes, {}, literals)]
        lines += ["nodes", *_lines(self.nodes, values, literals), str([values[n] for n in self.outputs])]
        return "\n".join(lines), tuple(literals)

    @property
    def key(self) -> str:
        """A text that is equal for segments of equal structure."""
        return self._text[0]

    @property
    def literals(self) -> tuple[int | str, ...]:
        """The arguments that name a layer. They are arguments of the function too."""
        return self._text[1]

    def copy(self) -> fx.GraphModule:
        """Return the part as a graph of its own, which a backend may rewrite.

        Parameters, state and activations are placeholders, the results are a flat tuple, and nodes are named by
        position. A literal is replaced by its index in `literals`, as a number or as text.
        """
        graph, root = fx.Graph(), torch.nn.Module()
        values: dict[fx.Node, fx.Node] = {}
        literals: list[int | str] = []
        for i, node in enumerate(self.inputs):
            values[node] = graph.placeholder(f"in_{i}")
            values[node].meta["val"] = node.meta["val"]
        for i, (node, branch) in enumerate(self.branches.items()):
            root.add_module(f"branch_{i}", _copy_branch(branch, literals))
            values[node] = graph.get_attr(f"branch_{i}")
        for i, node in enumerate(self.nodes):
            args, kwargs = _arguments(node, values, literals)
            values[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"n_{i}")
            values[node].meta = dict(node.meta)
        graph.output(tuple(values[n] for n in self.outputs))
        return fx.GraphModule(root, graph)


def segment(module: fx.GraphModule) -> list[Segment]:
    """Return the part before the layers, one segment per layer, and the part behind them, as `schedule` cuts them."""
    stages = schedule(module.graph)
    results = set(output_nodes(module.graph))
    parts = [stages.before, *stages.layers, stages.behind]
    return [_extract(module, part, results) for part in parts if part]


def _extract(module: fx.GraphModule, nodes: tuple[fx.Node, ...], results: set[fx.Node]) -> Segment:
    """Return the nodes of one part as a segment. Inputs are in the order of their first use, so equal parts agree."""
    inside = set(nodes)
    read: dict[fx.Node, None] = {}
    for node in nodes:
        read |= dict.fromkeys(a for a in node.all_input_nodes if a not in inside)
    branches = {n: b for n in read if (b := branch_of(module, n)) is not None}
    outputs = (n for n in nodes if n in results or any(u not in inside and u.op != "output" for u in n.users))
    return Segment(nodes, tuple(n for n in read if n not in branches), tuple(outputs), branches)


@dataclass(frozen=True)
class HostGraph:
    """A graph that becomes a function of the host's library: a decode step, or a prefill chunk.

    Attributes:
        module: fx graph.
        outputs: names of its results.
    """

    module: fx.GraphModule
    outputs: Sequence[str]

    @cached_property
    def segments(self) -> list[Segment]:
        """The parts of the graph, in order."""
        return segment(self.module)

    def to_json(self) -> list[object]:
        """Return all that the lowering reads of the graph: its inputs, its segments and how they are joined."""
        inputs = [[str(n.target), _type(n)] for n in self.module.graph.find_nodes(op="placeholder")]
        parts = [[p.key, p.literals, [_named(n) for n in p.inputs], [n.name for n in p.outputs]] for p in self.segments]
        return [inputs, parts, [n.name for n in output_nodes(self.module.graph)], list(self.outputs)]


def _named(node: fx.Node) -> str:
    """Return the name of a value; a parameter has one, however many nodes read it."""
    return f"parameter {node.target}" if node.op == "get_attr" else node.name
