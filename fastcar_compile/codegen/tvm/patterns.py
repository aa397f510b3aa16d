"""What in the fx graph one kernel computes at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fastcar_compile.ir.rewrite import is_op

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


def rotary(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, cos, sin) where node is x * cos + cat(-x[..., half:], x[..., :half]) * sin of four axes; else None.

    cos and sin are [1 or B, 1, T, D] for x [B, H, T, D].
    """
    if not is_op(node, aten.add) or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    for straight, turned in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        for x, cos in _operands(straight):  # type: ignore[arg-type]
            for half, sin in _operands(turned):  # type: ignore[arg-type]
                if _turns(half, x) and _fits_rows(cos, x) and _fits_rows(sin, x):
                    return x, cos, sin
    return None


def _turns(node: fx.Node, x: fx.Node) -> bool:
    """Whether node is cat(-x[..., half:], x[..., :half])."""
    shape = tuple(x.meta["val"].shape)
    if len(shape) != 4 or shape[3] % 2 or not is_op(node, aten.cat) or node.args[1:] not in ((-1,), (3,)):
        return False
    parts = node.args[0]
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        return False
    minus, low = parts
    if not isinstance(minus, fx.Node) or not is_op(minus, aten.neg):
        return False
    high = minus.args[0]
    return _is_slice(high, x, shape[3] // 2, shape[3]) and _is_slice(low, x, 0, shape[3] // 2)


def _is_slice(node: object, x: fx.Node, begin: int, end: int) -> bool:
    if not isinstance(node, fx.Node) or not is_op(node, aten.slice) or node.args[0] is not x or len(node.args) != 4:
        return False
    _, axis, first, last = node.args
    width = x.meta["val"].shape[3]
    return bool(axis in (3, -1) and first == begin and isinstance(last, int) and min(last, width) == end)


def _fits_rows(node: fx.Node, x: fx.Node) -> bool:
    batch, _, rows, width = x.meta["val"].shape
    return tuple(node.meta["val"].shape) in {(1, 1, rows, width), (batch, 1, rows, width)}


def rms_norm(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """(x, weight, epsilon) where node is x * rsqrt(mean(x^2, last axis) + epsilon) * weight, weight [K]; else None."""
    for scaled, weight in _operands(node):
        for x, inverse in _operands(scaled):
            epsilon = _inverse_root(inverse, x)
            if epsilon is not None and tuple(weight.meta["val"].shape) == tuple(x.meta["val"].shape[-1:]):
                return x, weight, epsilon
    return None


def _inverse_root(node: fx.Node, x: fx.Node) -> float | None:
    """epsilon where node is rsqrt(mean(x^2, last axis, keepdim) + epsilon)."""
    if not is_op(node, aten.rsqrt):
        return None
    shifted = node.args[0]
    if not isinstance(shifted, fx.Node) or not is_op(shifted, aten.add) or shifted.kwargs:
        return None
    mean, epsilon = shifted.args
    if not isinstance(epsilon, float) or not isinstance(mean, fx.Node) or not is_op(mean, aten.mean):
        return None
    last = [x.meta["val"].dim() - 1]
    if mean.args[1:] not in (([-1], True), (last, True)):
        return None
    square = mean.args[0]
    same = isinstance(square, fx.Node) and square.args in ((x, 2), (x, x))
    return epsilon if same and is_op(square, aten.pow, aten.mul) else None  # type: ignore[arg-type]


_LAYER_NORM_DEFAULTS = (None, None, None, None, 1e-5)
"""Of aten.layer_norm's first arguments."""


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalisation over the last axis; weight and bias [K], None: ones, zeros."""

    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    epsilon: float


def layer_norm(node: fx.Node) -> LayerNorm | None:
    """Of float32 rows over the last axis alone; else None."""
    if not is_op(node, aten.layer_norm):
        return None
    x, shape, weight, bias, epsilon = (*node.args, *_LAYER_NORM_DEFAULTS[len(node.args) :])[:5]
    if not isinstance(x, fx.Node) or list(shape) != [x.meta["val"].shape[-1]] or x.meta["val"].dtype != torch.float32:
        return None
    return LayerNorm(x, weight, bias, float(epsilon))
