"""Attention that a model writes out: product, scale, soft-cap, mask, softmax and product."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.dataflow import ancestors, between, evaluate
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import bound, is_op, node_arg, optional_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import before, replace_layout
from fastcar_compile.passes.patterns.norms import terms

aten = torch.ops.aten
MASKED = -1e9
"""An additive mask, or what fills a masked logit, is at most this."""

_CASTS = (aten.to, aten._to_copy, aten.alias, aten.detach, aten.contiguous, aten.clone, aten.dropout)
_VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
_PRODUCTS = (aten.matmul, aten.bmm, aten.baddbmm)


@dataclass(frozen=True)
class Mask:
    """A mask over logits [.., T, S]: bool, or added to them.

    `hidden`: its True is what a query does not see, or it is subtracted.
    """

    node: fx.Node
    hidden: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """One attention: `node` yields [B, Hq, T, D] from query [B, Hq, T, D] and keys and values [B, Hq or Hkv, S, D].

    Attributes:
        node: its first two axes may be one, or three.
        mask: None: there is none, or `problem` says what is wrong with it.
        scale: factor on the logits. softcap: their soft-cap, or None.
        problem: what no operator computes; "" if there is nothing.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: Mask | None
    scale: float
    softcap: float | None = None
    problem: str = ""

    def replace(self, made_by: str, target: Callable[..., Any], *arguments: Any) -> None:
        """Put an operator that gives [B, Hq, T, D] in the place of the attention."""
        with before(self.node, made_by) as emit:
            new = emit(target, *arguments)
            if shape_of(new) != shape_of(self.node):  # three axes, or five
                new = emit(aten.reshape.default, new, list(shape_of(self.node)))
        # The layout of PyTorch's own attention depends on its kernel; this operator's is contiguous.
        replace_layout(self.node, new)


def attention_calls(graph: fx.Graph) -> list[AttentionCall]:
    """Return every attention of a graph, in order, as a call of PyTorch's operator or written out."""
    found: list[AttentionCall] = []
    for node in graph.nodes:
        if is_op(node, aten.scaled_dot_product_attention):
            found.append(_of_operator(node))
        elif is_op(node, aten.softmax, aten._softmax) and (site := _written_out(node)) is not None:
            found.append(site)
    return found


def unrecognised(graph: fx.Graph, caches: dict[fx.Node, str]) -> list[CompileError]:
    """Return an error for written caches that the step reads, but not by an attention: one for all layers alike.

    Args:
        caches: their names.
    """
    softmaxes = [n for n in graph.nodes if is_op(n, aten.softmax, aten._softmax)]
    alike: dict[tuple[object, ...], list[list[fx.Node]]] = defaultdict(list)
    for cache in caches:
        # The operators between a write and the first softmax behind it are what was not recognised. Caches with equal
        # operators there are one problem.
        first = next((n for n in softmaxes if n > cache and cache in ancestors(n)), cache)
        nodes = between(cache, first)
        if any(is_op(n, aten.linear) for n in nodes):  # a cache of values: the softmax is another layer's
            nodes = [cache]
        alike[tuple(n.target for n in nodes)].append(nodes)
    # Caches with operators behind the write are reported. Where no cache has such operators, all of them are.
    keys = [found for kind, found in alike.items() if len(kind) > 1] or list(alike.values())
    return [_unrecognised(caches[found[0][0]], found) for found in keys]


def _unrecognised(name: str, found: list[list[fx.Node]]) -> CompileError:
    """Return the error of caches that are read alike, each with the nodes from its write to the first softmax."""
    (cache, *rest), *others = found
    nodes = ": nodes " + ", ".join(n.name for n in rest) if rest else ""
    more = f" ({len(others) + 1} caches are read in this way)" if others else ""
    what = f"what reads the cache '{name}' is not recognised as attention{nodes}{more}"
    hint = "call scaled_dot_product_attention, or write out the product of query and transposed key, scale, mask, "
    hint += "softmax and product with the values, as docs/reference/step_protocol.md has it"
    return error_at((rest or [cache])[-1], what, hint)


def _of_operator(node: fx.Node) -> AttentionCall:
    given = bound(node)
    query, key, value = (node_arg(node, i) for i in range(3))
    mask = None if given["attn_mask"] is None else Mask(given["attn_mask"])
    scale = shape_of(query)[-1] ** -0.5 if given["scale"] is None else float(given["scale"])
    problem = "" if given["dropout_p"] == 0.0 else f"attention dropout {given['dropout_p']} in a decode step"
    # `is_causal` aligns query row 0 with row 0 of the keys, which is wrong behind position 0 and for a context.
    if given["is_causal"]:
        problem = "attention with is_causal, whose mask begins at the first key at every position"
    return AttentionCall(node, query, key, value, mask, scale, problem=problem)


def _written_out(softmax: fx.Node) -> AttentionCall | None:
    """Return the attention around a softmax; None: it is another softmax."""
    # `matmul(dropout(softmax(mask(softcap(matmul(q, transpose(k)) * scale)))), v)`, with casts anywhere, and with views
    # that make one axis of rows and heads, or three: products of bmm, or of the query heads of each key head.
    product = _product_behind(softmax)
    if product is None or softmax.args[1] not in (-1, value_of(softmax).dim() - 1):
        return None
    logits = _Logits(_without_moves(node_arg(softmax, 0)))
    if (first := logits.product) is None:
        return None
    left, right = (node_arg(first, i + is_op(first, aten.baddbmm)) for i in (0, 1))
    query, value, keys = _heads(left), _heads(node_arg(product, 1), shared=True), _keys(right)
    if query is None or value is None or keys is None or shape_of(query)[0] != shape_of(keys[0])[0]:
        return None
    if any(prod(shape_of(p)[:-2]) != prod(shape_of(query)[:2]) for p in (first, product)):
        return None
    scale = logits.scale * keys[1]
    return AttentionCall(product, query, keys[0], value, logits.mask, scale, logits.softcap, logits.problem)


def _product_behind(softmax: fx.Node) -> fx.Node | None:
    """Return the product of the weights and the values, past casts and dropout."""
    node = softmax
    # torch.export writes an assert beside every cast; it is no second reader of the weights.
    while len(users := [u for u in node.users if not is_op(u, aten._assert_tensor_metadata)]) == 1:
        (user,) = users
        if is_op(user, aten.matmul, aten.bmm) and node_arg(user, 0) is node:
            return user
        # Dropout that is on in the decode step would make the weights random, so it ends the match. No weight is a NaN.
        if is_op(user, aten.dropout) and user.args[2] is not False:
            return None
        if not is_op(user, *_CASTS, aten.nan_to_num) and not _is_move(user):
            return None
        node = user
    return None


def _is_cast(node: fx.Node) -> bool:
    return is_op(node, *_CASTS) and not is_op(node, aten.dropout)


def _is_move(node: fx.Node) -> bool:
    """Return whether a node is a view with the last two axes of what it views, and other axes of rows and heads."""
    return is_op(node, *_VIEWS) and shape_of(node)[-2:] == shape_of(node_arg(node, 0))[-2:]


def _without_moves(node: fx.Node) -> fx.Node:
    """Return logits before casts, and before views of their rows and heads."""
    while _is_cast(node) or _is_move(node):
        node = node_arg(node, 0)
    return node


def _heads(node: fx.Node, *, shared: bool = False) -> fx.Node | None:
    """Return what an operand of a product is a view of, [B, heads, rows, D]; None: of nothing such.

    Args:
        shared: of keys or values, whose heads successive query heads share: as five axes they are [B, Hkv, 1, rows, D].
    """
    while (rank := value_of(node).dim()) != 4:
        if not _is_move(node):
            return None
        own, node = shape_of(node), node_arg(node, 0)
        if shared and rank == 5 and own[:3] != (*shape_of(node)[:2], 1):
            return None
    return node


def _keys(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return keys [B, heads, S, D] and a factor on them, where the node is the product transposed, [..., D, S]."""
    scale, order = 1.0, list(range(value_of(node).dim()))
    while True:
        first = list(range(len(order) - 2))
        swapped = [*first, len(order) - 1, len(order) - 2]
        if _is_cast(node):
            node = node_arg(node, 0)
        elif (factor := _factor(node)) is not None:
            node, scale = factor[0], scale * factor[1]
        elif order != swapped and (axes := _axes(node)) is not None:
            node, order = node_arg(node, 0), [axes[i] for i in order]
        elif order == swapped:
            heads = _heads(node, shared=True)
            return None if heads is None else (heads, scale)
        elif order == sorted(order) and len(order) != 4 and _is_move(node):
            node = node_arg(node, 0)
            order = list(range(value_of(node).dim()))
        else:
            return None


def _axes(node: fx.Node) -> list[int] | None:
    """Return the axes of its argument that a node has, in order; None: it moves no axes."""
    axes = list(range(value_of(node).dim()))
    if is_op(node, aten.permute):
        return [a % len(axes) for a in cast("list[int]", node.args[1])]
    if is_op(node, aten.mT, aten.transpose):
        a, b = (-2, -1) if is_op(node, aten.mT) else cast("tuple[int, int]", node.args[1:3])
        axes[a], axes[b] = axes[b], axes[a]
        return axes
    return None


class _Logits:
    """What is between the product of query and key and the softmax, read from the softmax back.

    Attributes:
        product: of query and key; None: there is none.
        mask, scale, softcap, problem: as of `AttentionCall`.
    """

    def __init__(self, node: fx.Node) -> None:
        self.mask: Mask | None = None
        self.scale, self.softcap, self.problem = 1.0, None, ""
        self.product = self._read(node)

    def _read(self, node: fx.Node) -> fx.Node | None:
        # From the softmax back, the mask comes first, then the soft-cap, then factors and casts in any number.
        node = _limited(node)
        unmasked = self._unmasked(node)
        outer = _factor(node)
        # `(logits + mask) * scale`: what hides a logit hides it times a number, too.
        if self.mask is None and outer is not None and outer[1] > 0:
            inner = self._unmasked(_without_moves(outer[0]))
            if self.mask is not None:
                unmasked, self.scale = inner, outer[1]
        capped = self._uncapped(unmasked)
        while not is_op(capped, *_PRODUCTS):
            inner = _without_moves(capped)
            if inner is capped:
                factor = _factor(capped)
                if factor is None:
                    return self._biased(capped)
                inner, self.scale = factor[0], self.scale * factor[1]
            capped = inner
        return self._product(capped)

    def _product(self, node: fx.Node) -> fx.Node | None:
        """Return the product, of which `baddbmm` brings a factor, and zeros or the mask."""
        if is_op(node, aten.baddbmm):
            given = bound(node)
            added = given["beta"] != 0 and not is_op(given["self"], aten.zeros) and _constant(given["self"]) != 0
            if added and (self.mask is not None or given["beta"] != 1):
                return None
            self.mask = Mask(given["self"]) if added else self.mask
            self.scale *= float(given["alpha"])
        return node

    def _biased(self, node: fx.Node) -> fx.Node | None:
        """Return the product below a second sum, which is a bias such as ALiBi; None: there is no product."""
        for logits, _ in terms(node):
            if _makes_logits(logits):
                self.problem = "the attention logits get a bias, such as ALiBi, which is not supported"
                return self._read(logits)
        return None

    def _unmasked(self, node: fx.Node) -> fx.Node:
        """Return the logits before the mask."""
        fill = node.args[2] if len(node.args) == 3 else None
        # `logits + mask`: the mask may broadcast, so the logits
        # have the shape of the sum, and the mask holds no product.
        for logits, mask in terms(node):
            if value_of(logits).shape == value_of(node).shape and not _makes_logits(mask):
                self.mask = Mask(mask)
                return _without_moves(logits)
        if is_op(node, aten.sub) and not node.kwargs and isinstance(node.args[1], fx.Node):
            self.mask = Mask(node.args[1], hidden=True)
            return _without_moves(node_arg(node, 0))
        # `masked_fill(logits, mask, -inf)` hides where the mask is True; `where(mask, logits, -inf)` where it is False.
        if is_op(node, aten.masked_fill) and self._hides(fill):
            self.mask = Mask(node_arg(node, 1), hidden=True)
            return _without_moves(node_arg(node, 0))
        if is_op(node, aten.where) and self._hides(fill):
            self.mask = Mask(node_arg(node, 0))
            return _without_moves(node_arg(node, 1))
        return node

    def _hides(self, fill: object) -> bool:
        """Return whether a number fills hidden logits, and note one that does not hide them."""
        number = _constant(fill)
        if number is not None and number > MASKED:
            self.problem = f"hidden attention logits become {number:g}, which does not hide them"
        return number is not None

    def _uncapped(self, node: fx.Node) -> fx.Node:
        """Return the logits before the soft-cap, and take note of it."""
        # `cap * tanh(logits / cap)`: the two factors must be inverse to each other.
        outer = _factor(node)
        if outer is None or not is_op(outer[0], aten.tanh):
            return node
        inner = _factor(node_arg(outer[0], 0))
        if inner is None or abs(inner[1] * outer[1] - 1) > 1e-6:
            return node
        self.softcap = outer[1]
        return _without_moves(inner[0])


def _factor(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (x, number) where the node is x times a number."""
    if is_op(node, aten.mul):
        for x, number in (node.args, reversed(node.args)):
            if isinstance(x, fx.Node) and (found := _constant(number)) is not None:
                return x, found
    if is_op(node, aten.div) and not node.kwargs:
        x, number = optional_arg(node, 0), _constant(node.args[1])
        if x is not None and number:
            return x, 1 / number
    return None


def _constant(value: object) -> float | None:
    """Return a number that an argument is, as it stands or as a constant tensor that the graph makes."""
    if isinstance(value, int | float):
        return float(value)
    if is_op(value, aten.full, aten.scalar_tensor, aten.full_like):
        assert isinstance(value, fx.Node)
        number = value.args[0] if is_op(value, aten.scalar_tensor) else value.args[1]
        return float(number) if isinstance(number, int | float) else None
    # A buffer, or what is computed of constants.
    module = value.graph.owning_module if isinstance(value, fx.Node) and shape_of(value) == () else None
    known = evaluate(module, value, {}) if module is not None and isinstance(value, fx.Node) else None
    return None if known is None else float(known)


def _limited(node: fx.Node) -> fx.Node:
    """Return logits without a least value that hides them, as `max(logits, finfo.min)` has it."""
    given = bound(node) if is_op(node, aten.maximum, aten.max, aten.clamp, aten.clamp_min) else {}
    least = _constant(given.get("other", given.get("min")))
    limits = given.get("max") is None and least is not None and least <= MASKED
    return _without_moves(node_arg(node, 0)) if limits else node


def _makes_logits(node: fx.Node) -> bool:
    """Whether a node is a product of computed values, past factors and casts, and so no mask."""
    while (factor := _factor(node)) is not None or is_op(node, *_CASTS, aten.tanh) or _is_move(node):
        node = factor[0] if factor is not None else node_arg(node, 0)
    return is_op(node, *_PRODUCTS)
