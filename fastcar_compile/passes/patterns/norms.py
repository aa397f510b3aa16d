"""A root-mean-square norm that is written out, and a layer norm over the last axis."""

from typing import Any

import torch
from torch import fx

from fastcar_compile.ir.query import bound, is_op, shape_of, value_of

aten = torch.ops.aten


# Products, sums and calls in a graph, as the matchers of norms and rotary embeddings read them.


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


def rms_norm(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Return (x, weight, epsilon) where node is x * rsqrt(mean(x^2, last axis) + epsilon) * weight, weight [K]."""
    # `(x * rsqrt(...)) * weight`, with both products in either order.
    for scaled, weight in factors(node):
        for x, inverse in factors(scaled):
            epsilon = _inverse_root(inverse, x)
            if epsilon is not None and shape_of(weight) == shape_of(x)[-1:]:
                return x, weight, epsilon
    return None


def _inverse_root(node: fx.Node, x: fx.Node) -> float | None:
    """Return epsilon where node is rsqrt(mean(x^2, last axis, keepdim) + epsilon)."""
    root = arguments(node, aten.rsqrt)
    shifted = arguments(root["self"], aten.add) if root is not None else None
    if shifted is None or not isinstance(shifted["other"], float) or shifted["alpha"] != 1:
        return None
    mean = arguments(shifted["self"], aten.mean)
    # A mean in a type of its own would round otherwise.
    if mean is None or not mean.get("keepdim") or mean["dtype"] is not None:
        return None
    last = mean["dim"] in ([-1], [len(shape_of(x)) - 1])
    return shifted["other"] if last and _is_square(mean["self"], x) else None


def _is_square(node: object, x: fx.Node) -> bool:
    power = arguments(node, aten.pow)
    if power is not None:
        return power["self"] is x and power.get("exponent") == 2
    return (x, x) in factors(node)


def layer_norm(node: fx.Node) -> tuple[Any, ...] | None:
    """Return (x, weight, bias, epsilon) where node is a layer norm of float32 rows over the last axis alone."""
    norm = arguments(node, aten.layer_norm)
    if norm is None:
        return None
    x = norm["input"]
    if list(norm["normalized_shape"]) != [shape_of(x)[-1]] or value_of(x).dtype != torch.float32:
        return None
    return x, norm["weight"], norm["bias"], float(norm["eps"])


# A rotary position embedding that is written out.


def rotary(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return (x, cos, sin) where node is x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin.

    x is [B, H, T, D], cos and sin are [1 or B, 1, T, D].
    """
    # `x * cos + rotate_half(x) * sin`, with the sum and both products in either order.
    for straight, rotated in terms(node):
        for x, cos in factors(straight):
            for half, sin in factors(rotated):
                if _is_half_turn(half, x) and _fits(cos, x) and _fits(sin, x):
                    return x, cos, sin
    return None


def _is_half_turn(node: fx.Node, x: fx.Node) -> bool:
    """Whether node is cat(-x[..., D/2:], x[..., :D/2])."""
    whole, cat = shape_of(x), arguments(node, aten.cat)
    if cat is None or len(whole) != 4 or whole[3] % 2 or cat["dim"] not in (-1, 3) or len(cat["tensors"]) != 2:
        return False
    minus, low = cat["tensors"]
    high = arguments(minus, aten.neg)
    if high is None:
        return False
    return _is_slice(high["self"], x, whole[3] // 2, whole[3]) and _is_slice(low, x, 0, whole[3] // 2)


def _is_slice(node: object, x: fx.Node, begin: int, end: int) -> bool:
    """Whether node is x[..., begin:end]; an end beyond the last element means the last one."""
    part = arguments(node, aten.slice)
    if part is None or part["self"] is not x or part["dim"] not in (-1, 3) or part["step"] != 1:
        return False
    last = part["end"]
    return part["start"] == begin and isinstance(last, int) and min(last, shape_of(x)[3]) == end


def _fits(table: fx.Node, x: fx.Node) -> bool:
    batch, _, rows, width = shape_of(x)
    return shape_of(table) in {(1, 1, rows, width), (batch, 1, rows, width)}
