"""What in the fx graph one kernel computes at once."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.passes.edit import is_op

aten, fastcar = torch.ops.aten, torch.ops.fastcar


def gated_product(x: fx.Node) -> tuple[fx.Node, fx.Node, str] | None:
    """(gate, up, activation) where x is activation(gate) * up with a table's factor, all of one shape; else None."""
    for product, up in _operands(x):
        for gate, factor in _operands(product):
            if is_op(factor, fastcar.activation_factor) and factor.args[0] is gate and _same_shape(x, gate, up):
                return gate, up, str(factor.args[1])
    return None


def _operands(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Both orders of the two factors of a product; none where it is no product of two nodes."""
    if not is_op(node, aten.mul) or not all(isinstance(a, fx.Node) for a in node.args[:2]):
        return []
    left, right = node.args[:2]
    return [(left, right), (right, left)]  # type: ignore[list-item]


def _same_shape(*nodes: fx.Node) -> bool:
    return len({tuple(n.meta["val"].shape) for n in nodes}) == 1
