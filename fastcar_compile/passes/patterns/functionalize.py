"""Functionalisation of in-place writes, in program order: into buffers here, into activations by `in_place`."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.dataflow import ancestors, evaluate
from fastcar_compile.ir.provenance import error_at, where
from fastcar_compile.ir.query import is_op, is_same, node_arg, optional_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import Inserter, attribute

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
        return error_at(node, what, "write caches as buffer.index_copy_(2, cache_position, new)")
    # `split` yields several views of one value. fx shows a getitem, from which the value cannot be put together.
    if base.target is operator.getitem:
        what = "writes in place into one of several views of a value (split, chunk, unbind)"
        return error_at(node, what, "write the result as a new value: torch.where, torch.cat or a sum")
    with module.graph.inserting_before(node):
        written = _functional(module, node, target)
        whole: fx.Node | None = written
        # From the written view outwards: each step puts the new part into the view's source.
        for step in reversed(steps):
            whole = None if whole is None else _whole(step, whole)
    if written is None or whole is None:
        what = f"{node.target} writes in place through {[str(s.target) for s in steps]}"
        return error_at(node, what, "write the result as a new value: torch.where, torch.cat or a sum")
    node.replace_all_uses_with(written)
    _read_new(node, base, whole, {target: written, base: whole})
    module.graph.erase_node(node)
    return None


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
    functional = _twin(node)
    return None if functional is None else _like(node, _call(node, functional, *node.args, **node.kwargs), target)


def _twin(node: fx.Node) -> Any:
    """Return the functional operator of an in-place one, as `aten.add.Tensor` of `aten.add_.Tensor`; None: none."""
    packet, _, overload = str(node.target).removeprefix("aten.").partition(".")
    return getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)


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
        dim, index = cast("tuple[int, int]", view.args[1:3])
        index %= shape_of(source)[dim]
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
    bounds, sides = [(0, first), (last, shape_of(source)[dim])], partial(_call, view, aten.slice.Tensor, source, dim)
    before, behind = ([sides(a, b)] if a < b else list[fx.Node]() for a, b in bounds)
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
    return Inserter(origin.graph, origin, MADE_BY)(target, *arguments, **options)


@dataclass
class CacheWrite:
    """A write into a 4-D buffer: the functional node, and the index that it was written at.

    `buffer` and `node` are [B, heads, S, D], also where the module keeps [B, S, heads, D].
    """

    root: str
    buffer: fx.Node
    node: fx.Node
    index: fx.Node
    origin: fx.Node


class Functionalizer:
    """Replaces in-place operators by functional ones; afterwards nothing in the graph mutates.

    Args:
        module: its graph is rewritten. position: its `position` placeholder.

    Attributes:
        writes: the cache writes found, in order. problems: what could not be rewritten.
    """

    def __init__(self, module: fx.GraphModule, position: fx.Node) -> None:
        self.module, self.graph, self.position = module, module.graph, position
        self.writes, self.problems = list[CacheWrite](), list[CompileError]()
        self._root, self._current, self._written = dict[fx.Node, str](), dict[str, fx.Node](), dict[str, str]()

    def run(self) -> None:
        """Rewrite the graph."""
        for node in list(self.graph.nodes):
            # In program order: a node first reads the last write in
            # front of it, and then becomes the last write itself.
            self._read_current(node)
            if node.op == "get_attr":
                self._root[node] = str(node.target)
            # A write through an alias goes into the buffer, so the alias gets the buffer's name. A copy has memory of
            # its own.
            elif is_same(node) and not is_op(node, aten._to_copy) and node.args[0] in self._root:
                self._root[node] = self._root[node.args[0]]
            elif writes_in_place(node):
                self._rewrite(node)
        self._check_carried()

    def _check_carried(self) -> None:
        """A step must not read what an earlier one wrote into a buffer that is no cache."""
        # A `get_attr` that the output still needs after the rewrite reads what the previous step left. Caches become
        # inputs later. Any other buffer is a constant of the artifact, so the written value would be lost.
        caches = {write.root for write in self.writes}
        read = ancestors(self.graph.output_node())
        for node in [n for n in self.graph.find_nodes(op="get_attr") if n in read]:
            place = self._written.pop(str(node.target), None) if node.target not in caches else None
            if place is not None:
                what = f"buffer '{node.target}' carries a value from step to step, and is no cache of keys or values"
                hint = "compute it from cache_position; only caches written with index_copy_ are state"
                self.problems.append(CompileError(what, where=place, hint=hint))

    def _read_current(self, node: fx.Node) -> None:
        """A read of a buffer after a write sees the written value; the target of a write stays the buffer."""
        target = node.args[0] if writes_in_place(node) else None

        def now(argument: fx.Node) -> fx.Node:
            if argument is target:
                return argument
            return self._current.get(self._root.get(argument, ""), argument)

        node.args = map_arg(node.args, now)
        node.kwargs = map_arg(node.kwargs, now)

    def _rewrite(self, node: fx.Node) -> None:
        buffer = optional_arg(node, 0)
        # `aten._foreach` operators have a list of tensors in this place.
        if buffer is None:
            self._refuse(node, f"{node.target} writes into several tensors at once")
            return
        root = self._root.get(buffer)
        # The target is no whole buffer: it is an activation, or a part of something, which `rewrite_write` looks into.
        if root is None:
            problem = rewrite_write(self.module, node)
            self.problems += [problem] if problem else []
            return
        with self.graph.inserting_before(node):
            value = self._functional(node, root, self._current.get(root, buffer))
        if value is None:
            return
        # The first write of a buffer is the place that an error names.
        self._written.setdefault(root, where(node))
        self._current[root] = value
        self._root[value] = root
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    def _functional(self, node: fx.Node, root: str, current: fx.Node) -> fx.Node | None:
        if is_op(node, aten.index_copy_, aten.index_put_) and current.meta["val"].dim() == 4:
            return self._cache_write(node, root, current)
        # A copy over the whole buffer leaves nothing of the old value, so the source is the new value.
        if is_op(node, aten.copy_) and node_arg(node, 1).meta["val"].shape == current.meta["val"].shape:
            return node_arg(node, 1)
        if is_op(node, aten.add_, aten.sub_, aten.mul_):
            return _call(node, _twin(node), current, *node.args[1:])
        self._refuse(node, f"{node.target} into buffer '{root}' cannot be lifted to explicit state")
        return None

    def _cache_write(self, node: fx.Node, root: str, current: fx.Node) -> fx.Node | None:
        axis, index, value = _write_operands(node)
        if index is None or value is None or axis not in (1, 2):
            what = "axis 2 of [B, heads, S, D], or axis 1 of [B, S, heads, D]"
            self._refuse(node, f"the write into '{root}' is not along the sequence axis ({what})")
            return None
        value = self._broadcast(node, current, axis, index, value)
        # A cache [B, S, heads, D] is transposed before the write and back behind it. The transposes in front of the
        # state go when normalize-state puts a placeholder [B, heads, S, D] in their place.
        buffer, rows = (self._heads_first(part, axis, node) for part in (current, value))
        written = _call(node, torch.ops.fastcar.cache_write.default, buffer, rows, self.position)
        self.writes.append(CacheWrite(root, buffer, written, index, node))
        return self._heads_first(written, axis, node)

    def _broadcast(self, node: fx.Node, buffer: fx.Node, axis: int, index: fx.Node, value: fx.Node) -> fx.Node:
        """Return the value in the shape of the rows that it is written to, which an indexed write may leave open.

        Python drops the leading axes of size 1 of what is assigned: a value of batch 1 comes without its batch.
        """
        # At batch 1, `buffer[:, :, position] = value` reaches the graph as a view of the value without its first axis.
        rows = list(shape_of(buffer))
        rows[axis] = value_of(index).numel()
        if is_op(value, aten.view) and shape_of(node_arg(value, 0)) == tuple(rows):
            return node_arg(value, 0)
        if shape_of(value) == tuple(rows):
            return value
        return _call(node, aten.expand.default, value, rows)

    def _heads_first(self, part: fx.Node, axis: int, origin: fx.Node) -> fx.Node:
        """Return a cache in the other layout where its sequence axis is 1; state always is [B, heads, S, D]."""
        return part if axis == 2 else _call(origin, aten.transpose.int, part, 1, 2)

    def _refuse(self, node: fx.Node, what: str) -> None:
        hint = "write caches as buffer.index_copy_(2, cache_position, new) and keep no other mutable buffer"
        self.problems.append(error_at(node, what, hint))


def _write_operands(node: fx.Node) -> tuple[int, fx.Node | None, fx.Node | None]:
    """(axis, index, value) of a write along one axis."""
    if is_op(node, aten.index_copy_):
        return cast("int", node.args[1]) % 4, node_arg(node, 2), node_arg(node, 3)
    # `buffer[:, :, position] = value` is `index_put_(buffer, [None, None, position], value)`.
    indices = cast("list[fx.Node | None]", node.args[1])
    accumulate = len(node.args) > 3 and bool(node.args[3])
    given = [axis for axis, index in enumerate(indices) if index is not None]
    # Axis -1 makes `_cache_write` refuse a sum into rows, and a write by indices of two axes.
    if accumulate or len(given) != 1:
        return -1, None, None
    return given[0], indices[given[0]], node_arg(node, 2)


def writes_in_place(node: fx.Node) -> bool:
    """Return whether a node calls an operator that writes into an argument."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return bool(schema and schema.is_mutable)
