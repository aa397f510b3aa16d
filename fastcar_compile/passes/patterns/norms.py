"""A root-mean-square norm that is written out, and a layer norm over the last axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fastcar_compile.passes.patterns.algebra import arguments, factors, shape, tensor

aten = torch.ops.aten


def rms_norm(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Return (x, weight, epsilon) where node is x * rsqrt(mean(x^2, last axis) + epsilon) * weight, weight [K]."""
    # `(x * rsqrt(...)) * weight`, with both products in either order.
    for scaled, weight in factors(node):
        for x, inverse in factors(scaled):
            epsilon = _inverse_root(inverse, x)
            if epsilon is not None and shape(weight) == shape(x)[-1:]:
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
    last = mean["dim"] in ([-1], [len(shape(x)) - 1])
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
    if list(norm["normalized_shape"]) != [shape(x)[-1]] or tensor(x).dtype != torch.float32:
        return None
    return x, norm["weight"], norm["bias"], float(norm["eps"])
