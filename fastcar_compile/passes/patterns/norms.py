"""A root-mean-square norm and a layer norm over the last axis, in any spelling."""

import math
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from fastcar_compile.ir.dataflow import ancestors
from fastcar_compile.ir.query import bound, is_op, shape_of, value_of

aten = torch.ops.aten


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


_POWERS = {aten.mul: (1, 1), aten.div: (1, -1), aten.reciprocal: (-1,), aten.sqrt: (0.5,), aten.rsqrt: (-0.5,)}
"""Operator -> the power of each argument in the product that it computes."""


def rms_norm(node: fx.Node) -> tuple[fx.Node, fx.Node | None, float] | None:
    """Return (x, weight, epsilon) where node is x * (mean(x^2, last axis) + epsilon)^-1/2 * weight, weight [..., K].

    The factors come in any order, by the operators of `_POWERS` and pow, or as `aten.rms_norm`. Both are float32. None
    in the place of the weight: there is none, and no reader of the node multiplies by one.

    In the place of the power there may be sqrt(K) / max(norm(x), least), as torch.nn.functional.normalize has it. The
    epsilon is least^2 / K then: for norms above 4096 least that is the same float32, and a row of zeros stays zero.
    """
    if (given := arguments(node, aten.rms_norm)) is not None:
        x, weight, epsilon = given["input"], given["weight"], given["eps"]
        epsilon = torch.finfo(torch.float32).eps if epsilon is None else epsilon  # as torch.rms_norm has it
        if weight is None:
            last = list(given["normalized_shape"]) == [shape_of(x)[-1]] and value_of(x).dtype == torch.float32
            return (x, None, float(epsilon)) if last else None
        return (x, weight, float(epsilon)) if _is_scale(weight, x) else None
    for root, power in _product(node, None):
        found = _mean_square(root) if power == -0.5 else _length(root) if power == -1 else None
        if found is not None:
            x, epsilon, scale = found
            # Once more with x as one factor, because x may be a product itself.
            whole = _product(node, x)
            number = math.prod(float(f) ** p for f, p in whole if not isinstance(f, fx.Node))
            product = Counter((f, p) for f, p in whole if isinstance(f, fx.Node))
            if not math.isclose(number, scale, rel_tol=1e-6):
                continue
            for weight, _ in product:
                if _is_scale(weight, x) and product == Counter([(x, 1), (root, power), (weight, 1)]):
                    return x, weight, epsilon
            bare = product == Counter([(x, 1), (root, power)]) and value_of(x).dtype == torch.float32
            if bare and not _scaled_behind(node, x):
                return x, None, epsilon
    return None


def _scaled_behind(node: fx.Node, x: fx.Node) -> bool:
    """Return whether a reader multiplies by a weight of x's last axis."""
    return any(_is_scale(w, x) for user in node.users for _, w in factors(user))


def _product(node: Any, x: fx.Node | None, power: float = 1) -> list[tuple[Any, float]]:
    """Return the factors of a node with their powers, down to `x` and to what is no product."""
    if node is x or not isinstance(node, fx.Node) or node.kwargs:
        return [] if node == 1 else [(node, power)]
    powers: Any = next((p for packet, p in _POWERS.items() if is_op(node, packet)), None)
    powers = node.args[1:] if node.target is aten.pow.Tensor_Scalar else powers
    if powers is None:
        return [(node, power)]
    return [factor for a, p in zip(node.args, powers, strict=False) for factor in _product(a, x, power * p)]


def _length(node: object) -> tuple[fx.Node, float, float] | None:
    """Return (x, epsilon, scale) where node is max(norm(x, last axis, keepdim) * a number, least).

    scale / node is (mean(x^2) + epsilon)^-1/2 then.
    """
    least, number = 0.0, 1.0
    if (spread := arguments(node, aten.expand_as)) is not None:
        node = spread["self"]
    limited = arguments(node, aten.clamp_min) or arguments(node, aten.clamp)
    if limited is not None:
        if limited.get("max") is not None or not isinstance(limited["min"], int | float) or limited["min"] < 0:
            return None
        node, least = limited["self"], float(limited["min"])
    product = arguments(node, aten.mul)
    if product is not None and isinstance(product["other"], int | float) and product["other"] > 0:
        node, number = product["self"], float(product["other"])
    norm = arguments(node, aten.linalg_vector_norm) or arguments(node, aten.linalg_norm)
    if norm is None or norm["ord"] not in (2, None) or not is_last(norm, norm["self"]):
        return None
    scale = number * shape_of(norm["self"])[-1] ** 0.5
    return norm["self"], (least / scale) ** 2, scale


def is_last(given: dict[str, Any], x: fx.Node) -> bool:
    """Return whether a reduction is over the last axis of x alone, which stays, in float32."""
    end = len(shape_of(x)) - 1
    last = given.get("keepdim") and given["dim"] in ([-1], [end], -1, end)
    # A sum in another type would round otherwise.
    return bool(last) and given.get("dtype") in (None, torch.float32)


def _mean_square(node: object) -> tuple[fx.Node, float, float] | None:
    """Return (x, epsilon, 1) where node is mean(x^2, last axis, keepdim) + epsilon."""
    shifted = arguments(node, aten.add) or {}
    mean = _mean(shifted.get("self"))
    squares = [arguments(mean.get("self"), packet) for packet in (aten.pow, aten.square, aten.mul)]
    square = squares[0] or squares[1] or squares[2] or {}
    x, epsilon = square.get("self"), shifted.get("other")
    if x is None or not isinstance(epsilon, int | float):
        return None
    squared = square.get("exponent", 2) == 2 and square.get("other", x) is x and shifted["alpha"] == 1
    whole = mean["count"] in (None, shape_of(x)[-1])
    return (x, float(epsilon), 1.0) if squared and is_last(mean, x) and whole else None


def _mean(node: object) -> dict[str, Any]:
    """Return the arguments of a mean, or of a sum that is divided by `count`; nothing where node is neither."""
    apart = arguments(node, aten.unsqueeze)
    if apart is not None and apart["dim"] in (-1, len(shape_of(apart["self"]))):
        # The axis comes back behind the mean.
        found = _mean(apart["self"])
        return found | {"keepdim": True} if found and not found["keepdim"] else {}
    quotient, product = arguments(node, aten.div), arguments(node, aten.mul)
    for given, part in ((quotient, 1), (product, -1)):
        total = arguments(given["self"], aten.sum) if given else None
        if given and total and total.get("dim") and isinstance(given["other"], int | float):
            return total | {"count": round(given["other"] ** part, 6)}
    return (arguments(node, aten.mean) or {}) | {"count": None}


def _is_scale(weight: object, x: fx.Node) -> bool:
    """Return whether the weight has one value for each of the last axis of x, both float32."""
    if not isinstance(weight, fx.Node) or not shape_of(weight) or not shape_of(x):
        return False
    *others, last = shape_of(weight)
    if last != shape_of(x)[-1] or len(others) >= len(shape_of(x)) or any(n != 1 for n in others):
        return False
    if others and any(n.op == "placeholder" for n in ancestors(weight)):
        return False
    return value_of(weight).dtype == value_of(x).dtype == torch.float32


def layer_norm(node: fx.Node) -> tuple[Any, ...] | None:
    """Return (x, weight, bias, epsilon) where node is a layer norm of float32 rows over the last axis alone."""
    norm = arguments(node, aten.layer_norm)
    if norm is None:
        return None
    x = norm["input"]
    if list(norm["normalized_shape"]) != [shape_of(x)[-1]] or value_of(x).dtype != torch.float32:
        return None
    return x, norm["weight"], norm["bias"], float(norm["eps"])


def written_layer_norm(node: fx.Node) -> tuple[Any, ...] | None:
    """Return the same where node is (x - mean) * (variance + epsilon)^-1/2 * weight + bias, of operators of its own.

    Mean and variance are of the last axis; the variance is not that of a sample. Weight and bias may be None: there is
    none, and no reader of the node brings it.
    """
    for product, bias in [*terms(node), (node, None)]:
        parts = _product(product, None)
        for root, _ in [part for part in parts if part[1] == -0.5]:
            x, epsilon = _variance(root) or (None, 0.0)
            rest = [f for f, p in parts if f is not root and p == 1]
            weights = [f for f in rest if _centred(f) is not x]
            scales = [v for v in (*weights, bias) if v is not None]
            if x is None or len(rest) - len(weights) != 1 or len(weights) > 1 or len(rest) + 1 != len(parts):
                continue
            if not all(_is_scale(v, x) for v in scales) or value_of(x).dtype != torch.float32:
                continue
            more = bias is None and any(_is_scale(b, x) for user in node.users for _, b in terms(user))
            if not more and not (not weights and _scaled_behind(node, x)):
                return x, next(iter(weights), None), bias, epsilon
    return None


def _variance(node: object) -> tuple[fx.Node, float] | None:
    """Return (x, epsilon) where node is the variance of x over the last axis + epsilon."""
    if (found := _mean_square(node)) is not None:
        x = _centred(found[0])
        return None if x is None else (x, found[1])
    shifted = arguments(node, aten.add) or {}
    epsilon, variance = shifted.get("other"), _item(shifted.get("self"), 0) or arguments(shifted.get("self"), aten.var)
    if variance is None or not isinstance(epsilon, int | float) or shifted["alpha"] != 1:
        return None
    x, of_sample = variance["self"], variance.get("correction", variance.get("unbiased"))
    return (x, float(epsilon)) if of_sample in (0, False) and is_last(variance, x) else None


def _centred(node: object) -> fx.Node | None:
    """Return x where node is x minus its mean over the last axis."""
    difference = arguments(node, aten.sub)
    if difference is None or difference["alpha"] != 1:
        return None
    x, mean = difference["self"], _item(difference["other"], 1) or arguments(difference["other"], aten.mean)
    return x if mean is not None and mean["self"] is x and is_last(mean, x) else None


def _item(node: object, index: int) -> dict[str, Any] | None:
    """Return the arguments of `aten.var_mean` where node is its result of that number."""
    taken = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == index
    return arguments(node.args[0], aten.var_mean) if isinstance(node, fx.Node) and taken else None


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
