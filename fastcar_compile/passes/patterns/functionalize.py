"""Functionalisation of in-place writes, in program order: into buffers here, into activations by `in_place`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import ancestors, is_op, node_arg, optional_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import call
from fastcar_compile.passes.patterns.in_place import rewrite_write

aten = torch.ops.aten
MADE_BY = "normalize-state"
_FUNCTIONAL: dict[object, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
}


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


@dataclass
class Functionalizer:
    """Replaces in-place operators by functional ones; afterwards nothing in the graph mutates.

    Attributes:
        module: its graph is rewritten.
        position: its `position` placeholder.
        writes: the cache writes found, in order.
        problems: what could not be rewritten.
    """

    module: fx.GraphModule
    position: fx.Node
    writes: list[CacheWrite] = field(default_factory=list[CacheWrite])
    problems: list[CompileError] = field(default_factory=list[CompileError])
    _root: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    _current: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    _written: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def graph(self) -> fx.Graph:
        """The graph to rewrite."""
        return self.module.graph

    def run(self) -> bool:
        """Returns whether the graph was modified."""
        modified = False
        for node in list(self.graph.nodes):
            # In program order: a node first reads the last write in
            # front of it, and then becomes the last write itself.
            self._read_current(node)
            if node.op == "get_attr":
                self._root[node] = str(node.target)
            # A write through an alias goes into the buffer, so the alias gets the buffer's name.
            elif _is_alias(node) and node.args[0] in self._root:
                self._root[node] = self._root[node.args[0]]
            elif writes_in_place(node):
                modified = True
                self._rewrite(node)
        self._check_carried()
        return modified

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
        root = None if buffer is None else self._root.get(buffer)
        # `aten._foreach` operators have a list of tensors in this place.
        if buffer is None:
            self._refuse(node, f"{node.target} writes into several tensors at once")
            return
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
        target = _FUNCTIONAL.get(node.target)
        if target is not None:
            return call(self.graph, target, (current, *node.args[1:]), origin=node, made_by=MADE_BY)
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
        arguments = (buffer, rows, self.position)
        written = call(self.graph, torch.ops.fastcar.cache_write.default, arguments, origin=node, made_by=MADE_BY)
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
        return call(self.graph, aten.expand.default, (value, rows), origin=node, made_by=MADE_BY)

    def _heads_first(self, part: fx.Node, axis: int, origin: fx.Node) -> fx.Node:
        """Return a cache in the other layout where its sequence axis is 1; state always is [B, heads, S, D]."""
        if axis == 2:
            return part
        return call(self.graph, aten.transpose.int, (part, 1, 2), origin=origin, made_by=MADE_BY)

    def _refuse(self, node: fx.Node, what: str) -> None:
        hint = "write caches as buffer.index_copy_(2, cache_position, new) and keep no other mutable buffer"
        self.problems.append(CompileError(what, where=where(node), hint=hint))


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


def _is_alias(node: fx.Node) -> bool:
    if is_op(node, aten.alias, aten.detach):
        return True
    return is_op(node, aten.to) and node_arg(node, 0).meta["val"].dtype == node.meta["val"].dtype


def writes_in_place(node: fx.Node) -> bool:
    """Return whether a node calls an operator that writes into an argument."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return bool(schema and schema.is_mutable)
