"""Rows taken by known numbers, `x[:, [-2]]`: slices, or lookups whose numbers are all within the axis."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from fastcar_compile.ir.query import evaluate, is_op, node_arg, shape_of
from fastcar_compile.ir.rewrite import attribute, call

aten = torch.ops.aten


def rewrite_index(module: fx.GraphModule, node: fx.Node, made_by: str) -> fx.Node | None:
    """Return what takes the same rows; None where the node is no index along one axis by known numbers.

    Numbers from the end of an axis are legal in PyTorch. A lookup of another library reads outside of the tensor.
    """
    found = _axis(module, node)
    if found is None:
        return None
    axis, rows = found
    x, first = node_arg(node, 0), int(rows[0])
    with module.graph.inserting_before(node):
        target: Any = aten.slice.Tensor
        arguments: tuple[Any, ...] = (x, axis, first, first + len(rows))
        # Consecutive rows are a slice. Other rows need a lookup, and their numbers become a buffer of the module.
        if not torch.equal(rows, torch.arange(first, first + len(rows))):
            place = attribute(module, _free_name(module), rows, node, made_by)
            target, arguments = aten.index_select.default, (x, axis, place)
        return call(module.graph, target, arguments, origin=node, made_by=made_by)


def _axis(module: fx.GraphModule, node: fx.Node) -> tuple[int, Tensor] | None:
    """The axis and the rows, counted from the front."""
    if not is_op(node, aten.index):
        return None
    # torch.export writes `x[:, rows]` as `index(x, [None, rows])`: None stands for an axis that stays whole.
    indices = cast("list[fx.Node | None]", node.args[1])
    axis = len(indices) - 1
    given = indices[axis] if not any(indices[:axis]) else None
    # No input is known here, so the evaluation succeeds only for constants.
    rows = None if given is None else evaluate(module, given, {})
    if rows is None or rows.dim() != 1 or not rows.numel() or rows.dtype not in (torch.int64, torch.int32):
        return None
    return axis, torch.where(rows < 0, rows + shape_of(node_arg(node, 0))[axis], rows).long()


def _free_name(module: fx.GraphModule) -> str:
    taken = {name for name, _ in module.named_buffers()}
    return next(name for i in range(len(taken) + 1) if (name := f"rows_{i}") not in taken)
