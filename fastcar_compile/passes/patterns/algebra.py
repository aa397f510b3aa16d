"""Products, sums and calls in a graph, as the matchers of norms and rotary embeddings read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.ir.query import is_op
from fastcar_compile.ir.schema import bound

aten = torch.ops.aten


def tensor(node: fx.Node) -> Tensor:
    """Return the fake value of a node."""
    return node.meta["val"]


def shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor."""
    return tuple(int(d) for d in tensor(node).shape)


def factors(node: object) -> list[tuple[fx.Node, fx.Node]]:
    """Return both orders of the two factors of a product; none where `node` is no product of two nodes."""
    return _either_order(node, aten.mul)


def terms(node: object) -> list[tuple[fx.Node, fx.Node]]:
    """Return both orders of the two terms of a plain sum; none where `node` is no sum of two nodes."""
    # An `alpha` makes the sum `a + alpha * b`, which is no plain one.
    return _either_order(node, aten.add) if isinstance(node, fx.Node) and not node.kwargs else []


def _either_order(node: object, packet: Any) -> list[tuple[fx.Node, fx.Node]]:
    if not isinstance(node, fx.Node) or not is_op(node, packet):
        return []
    left, right = node.args[:2]
    # A number beside the node, as in `x * 2.0`, makes no pair of nodes.
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    return [(left, right), (right, left)]


def arguments(node: object, packet: Any) -> dict[str, Any] | None:
    """Return the arguments of a call of this operator, by name; None where `node` is no such call."""
    return bound(node) if isinstance(node, fx.Node) and is_op(node, packet) else None
