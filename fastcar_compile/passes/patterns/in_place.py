"""In-place writes into activations, and into parts of them, as functional operators."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import evaluate, is_op, node_arg, optional_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import attribute, call

aten = torch.ops.aten
MADE_BY = "normalize-state"
_SHAPED = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
"""Views with the elements of their source in the same order."""
_NAMES = (aten.alias, aten.detach, aten.to, aten.contiguous)
"""Second names of a value, where they change neither type nor layout."""


def rewrite_write(module: fx.GraphModule, node: fx.Node) -> CompileError | None:
    """Replace an in-place operator on an activation by functional ones; return what is wrong where that cannot be.

    Whatever reads the activation afterwards, or a view of it, reads the new value.
    """
    target = node_arg(node, 0)
    steps = _views(target)
    # The base owns the memory. Every other view of it changes with this write.
    base = node_arg(steps[0], 0) if steps else target
    if base.op == "get_attr":
        what = f"writes in place into a part of the buffer '{base.target}', which is no cache"
        return _problem(node, what, "write caches as buffer.index_copy_(2, cache_position, new)")
    # `split` yields several views of one value. fx shows a getitem, from which the value cannot be put together.
    if base.target is operator.getitem:
        what = "writes in place into one of several views of a value (split, chunk, unbind)"
        return _problem(node, what, "write the result as a new value: torch.where, torch.cat or a sum")
    with module.graph.inserting_before(node):
        written = _functional(module, node, target)
        whole: fx.Node | None = written
        # From the written view outwards: each step puts the new part into the view's source.
        for step in reversed(steps):
            whole = None if whole is None else _whole(step, whole)
    if written is None or whole is None:
        what = f"{node.target} writes in place through {[str(s.target) for s in steps]}"
        return _problem(node, what, "write the result as a new value: torch.where, torch.cat or a sum")
    node.replace_all_uses_with(written)
    _read_new(node, base, whole, {target: written, base: whole})
    module.graph.erase_node(node)
    return None


def _problem(node: fx.Node, what: str, hint: str) -> CompileError:
    return CompileError(what, where=where(node), hint=hint)


def _views(node: fx.Node) -> list[fx.Node]:
    """The views from a value to this node, outermost first; empty where the node is no view."""
    steps: list[fx.Node] = []
    while _is_view(node):
        steps.insert(0, node)
        node = node_arg(node, 0)
    return steps


def _is_view(node: fx.Node) -> bool:
    """Whether the node shares memory with its first argument: PyTorch is asked with the layout that the graph has."""
    if optional_arg(node, 0) is None or not isinstance(node.meta.get("val"), Tensor):
        return False
    # `reshape`, `contiguous` and `to` return a view or a copy, as the strides want it. The schema only says "perhaps",
    # so the operator runs on the meta device.
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not any(a.alias_info for a in schema.returns):
        return False
    source = value_of(node_arg(node, 0))
    like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    try:
        made = cast("Callable[..., Tensor]", node.target)(like, *node.args[1:], **node.kwargs)
    except (RuntimeError, TypeError):  # another argument is a node, so the operator is no plain view
        return False
    return made.untyped_storage() is like.untyped_storage()


def _functional(module: fx.GraphModule, node: fx.Node, target: fx.Node) -> fx.Node | None:
    """The value of `target` after the write."""
    if is_op(node, aten.copy_):
        return _like(node, node_arg(node, 1), target)
    if is_op(node, aten.fill_, aten.zero_):
        fill = 0.0 if is_op(node, aten.zero_) else node.args[1]
        zeros = _call(node, aten.zeros_like.default, target)
        return _call(node, aten.add.Tensor, zeros, fill)
    if is_op(node, aten.index_put_):
        return _placed(module, node, target)
    # `aten.add_.Tensor` has a functional twin, `aten.add.Tensor`.
    packet, _, overload = str(node.target).removeprefix("aten.").partition(".")
    functional = getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)
    if functional is None:
        return None
    return _like(node, _call(node, functional, *node.args, **node.kwargs), target)


def _placed(module: fx.GraphModule, node: fx.Node, target: fx.Node) -> fx.Node:
    """The value after `target[indices] = value`: a choice by a mask, if the indices are known and the value is one."""
    indices = cast("list[fx.Node | None]", node.args[1])
    value = node_arg(node, 2)
    known = [None if i is None else evaluate(module, i, {}) for i in indices]
    accumulate = len(node.args) > 3 and bool(node.args[3])
    # `known` has a None for an axis that stays whole, and for an index that is not known; the latter has a node.
    found = all((i is None) == (k is None) for i, k in zip(indices, known, strict=True))
    if accumulate or not found or value_of(value).numel() != 1:
        return _call(node, aten.index_put.default, *node.args)
    shape = shape_of(target)
    sizes = [1 if i is None else d for i, d in zip(known, shape, strict=False)]
    # Indices that are known make a constant mask, and a choice by a mask is an operator that all backends have.
    mask = torch.zeros([*sizes, *shape[len(known) :]], dtype=torch.bool)
    mask[tuple(slice(None) if k is None else k for k in known)] = True
    name = f"written_{len([n for n, _ in module.named_buffers() if n.startswith('written_')])}"
    place = attribute(module, name, mask, node, MADE_BY)
    return _call(node, aten.where.self, place, value, target)


def _like(node: fx.Node, value: fx.Node, target: fx.Node) -> fx.Node:
    """The value in type and shape of what it is written into."""
    # An in-place operator keeps type and shape of its target. The functional one promotes types instead.
    if value_of(value).dtype != value_of(target).dtype:
        value = _call(node, aten.to.dtype, value, value_of(target).dtype)
    if shape_of(value) != shape_of(target):
        value = _call(node, aten.expand.default, value, list(shape_of(target)))
    return value


def _whole(view: fx.Node, part: fx.Node) -> fx.Node | None:
    """The source of a view after `part` was written into the view; None where that is not known."""
    source = node_arg(view, 0)
    if is_op(view, *_SHAPED, *_NAMES):
        return _call(view, aten.reshape.default, part, list(shape_of(source)))
    if is_op(view, aten.transpose):
        return _call(view, aten.transpose.int, part, *view.args[1:])
    if is_op(view, aten.permute):
        # The inverse permutation takes the part back to the axes of its source.
        order = cast("list[int]", view.args[1])
        return _call(view, aten.permute.default, part, [order.index(i) for i in range(len(order))])
    if is_op(view, aten.select):
        dim, index = (*view.args[1:],)[:2]
        dim, index = int(cast("int", dim)), int(cast("int", index))
        size = shape_of(source)[dim]
        index %= size
        return _joined(view, _call(view, aten.unsqueeze.default, part, dim), dim, (index, index + 1))
    if is_op(view, aten.slice):
        return _joined_slice(view, part)
    return None


def _joined_slice(view: fx.Node, part: fx.Node) -> fx.Node | None:
    dim, begin, end, step = (*view.args[1:], *(0, None, None, 1)[len(view.args) - 1 :])
    if step != 1:
        return None
    dim = int(cast("int", dim or 0))
    size = shape_of(node_arg(view, 0))[dim]
    first, last, _ = slice(cast("int | None", begin), cast("int | None", end)).indices(size)
    return _joined(view, part, dim, (first, last))


def _joined(view: fx.Node, part: fx.Node, dim: int, rows: tuple[int, int]) -> fx.Node:
    """The view's source with `part` in the place of its rows [first, last)."""
    source, (first, last) = node_arg(view, 0), rows
    # `cat(source[:first], part, source[last:])`; a side without rows is left out.
    bounds = [(0, first), (last, shape_of(source)[dim])]
    before, behind = (
        [_call(view, aten.slice.Tensor, source, dim, a, b)] if a < b else list[fx.Node]() for a, b in bounds
    )
    return _call(view, aten.cat.default, [*before, part, *behind], dim) if before or behind else part


def _read_new(write: fx.Node, base: fx.Node, whole: fx.Node, known: dict[fx.Node, fx.Node]) -> None:
    """Let what stands behind the write read the new value; views that were taken before are taken again."""
    stack = [base]
    while stack:
        old = stack.pop()
        # A view that was taken before the write shows the new value to whoever reads it after the write.
        stack += [user for user in old.users if user < write and _is_view(user) and node_arg(user, 0) is old]
        readers = [user for user in old.users if user > write]
        if not readers:
            continue
        with write.graph.inserting_before(write):
            new = _taken_again(old, known)
        for user in readers:
            user.replace_input_with(old, new)


def _taken_again(view: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    if view not in known:
        source = _taken_again(node_arg(view, 0), known)
        known[view] = _call(view, cast("Callable[..., Any]", view.target), source, *view.args[1:], **view.kwargs)
    return known[view]


def _call(origin: fx.Node, target: Callable[..., Any], *arguments: Any, **options: Any) -> fx.Node:
    return call(origin.graph, target, arguments, origin=origin, made_by=MADE_BY, **options)
