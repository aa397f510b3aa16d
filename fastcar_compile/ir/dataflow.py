"""What depends on what in a graph, and what a node is where its inputs are known."""

from collections.abc import Container
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.ir.query import get_attribute


def descendants(*nodes: fx.Node) -> set[fx.Node]:
    """Return every node that depends on one of `nodes`, themselves included."""
    found = set(nodes)
    stack = [*nodes]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def ancestors(*nodes: fx.Node, until: Container[fx.Node] = ()) -> set[fx.Node]:
    """Return every node that one of `nodes` depends on, themselves included, not looking past the nodes of `until`."""
    found = set(nodes)
    stack = [n for n in found if n not in until]
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                if parent not in until:
                    stack.append(parent)
    return found


def in_order(graph: fx.Graph, nodes: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a set in graph order."""
    return [n for n in graph.nodes if n in nodes]


def between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return every node on a path from `first` to `last`, both included, in graph order.

    It looks at no node before `first` that `first` does not lead to. So the cost of a layer does not grow with the
    number of layers.
    """
    reached = {first}
    # Nodes compare by their place in the graph, so an input is looked at before its reader.
    for node in sorted(ancestors(last, until={first})):
        if any(a in reached for a in node.all_input_nodes):
            reached.add(node)
    return sorted(reached)


def evaluate(module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Tensor]) -> Tensor | None:
    """Return the concrete value of a node when some nodes' values are given.

    None: it depends on another input, or on a parameter whose value is not there (meta device).
    """
    values: dict[fx.Node, Any] = dict(known)
    # Known nodes end the walk, so what they follow from may be unknown.
    needed = ancestors(node, until=known)
    for current in sorted(needed - set(known)):
        if current.op == "get_attr":
            values[current] = get_attribute(module, str(current.target))
            if isinstance(values[current], Tensor) and values[current].is_meta:
                return None
            continue
        if current.op != "call_function" or not callable(current.target):
            return None
        args, kwargs = map_arg((current.args, dict(current.kwargs)), lambda n: values[n])
        # Operators run on real tensors here, those of `fastcar::` by their eager definitions.
        values[current] = current.target(*args, **kwargs)
    return values[node]
