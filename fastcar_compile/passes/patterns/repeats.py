"""`repeat_interleave` by one number, as views that every backend has: interleaved RoPE is written with it."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.query import node_arg, shape_of
from fastcar_compile.ir.rewrite import call

aten = torch.ops.aten


def rewrite_repeat(node: fx.Node, made_by: str) -> fx.Node | None:
    """Return unsqueeze, expand and reshape for `x.repeat_interleave(n, axis)`; None: it is another node."""
    if node.target is not aten.repeat_interleave.self_int:
        return None
    source = node_arg(node, 0)
    times, axis = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if not isinstance(times, int) or not isinstance(axis, int):
        return None
    shape = list(shape_of(source))
    axis %= len(shape)
    spread = [*shape[: axis + 1], times, *shape[axis + 1 :]]
    joined = [*shape[:axis], shape[axis] * times, *shape[axis + 1 :]]
    with node.graph.inserting_before(node):
        for target, argument in (
            (aten.unsqueeze.default, axis + 1),
            (aten.expand.default, spread),
            (aten.reshape.default, joined),
        ):
            source = call(node.graph, target, (source, argument), origin=node, made_by=made_by)
    return source
