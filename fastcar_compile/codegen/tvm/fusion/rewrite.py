"""What the fusion steps share: replacing a node."""

from __future__ import annotations

from collections.abc import Callable
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
