"""A rotary position embedding that is written out."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.passes.patterns.algebra import arguments, factors, shape, terms

aten = torch.ops.aten


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
    whole, cat = shape(x), arguments(node, aten.cat)
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
    return part["start"] == begin and isinstance(last, int) and min(last, shape(x)[3]) == end


def _fits(table: fx.Node, x: fx.Node) -> bool:
    batch, _, rows, width = shape(x)
    return shape(table) in {(1, 1, rows, width), (batch, 1, rows, width)}
