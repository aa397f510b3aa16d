"""What the fusion steps share: replacing a node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from fastcar_compile.ir.rewrite import set_origin

GraphStep = Callable[[fx.Graph], None]
"""A rewrite of one graph. A step finds its own pattern and leaves everything else as it is."""


def replace(node: fx.Node, operator: OpOverload, args: tuple[Any, ...], made_by: str) -> None:
    """Put a call of `operator`, which yields the same value, in the place of a node."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(operator, args)
    set_origin(new, node, made_by)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)


def replace_all(nodes: Sequence[fx.Node], target: OpOverload, args: tuple[Any, ...], made_by: str) -> None:
    """Put the results of one call, which are the same values, in the places of several nodes.

    The call stands where its last argument is known. Every reader of a node has to stand behind that.
    """
    # Nodes compare by their place in the graph: the call needs its last argument.
    after = max(argument for argument in args if isinstance(argument, fx.Node))
    with after.graph.inserting_after(after):
        new = after.graph.call_function(target, args)
    set_origin(new, nodes[0], made_by)
    new.meta["val"] = tuple(node.meta["val"] for node in nodes)
    place = new
    for index, node in enumerate(nodes):
        with new.graph.inserting_after(place):
            place = new.graph.call_function(operator.getitem, (new, index))
        set_origin(place, node, made_by)
        place.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(place)
