"""Operators over rows [B * T, H] become operators over [B, T, H], where a model folds its batch for a while (OPT)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import fx
from torch.fx.node import map_arg

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import activation_of, in_order, is_op, node_arg, shape_of
from fastcar_compile.ir.rewrite import before

aten = torch.ops.aten
_VIEWS = (aten.view, aten.reshape, aten.flatten, aten._unsafe_view)
_POINTWISE = (aten.add, aten.sub, aten.mul, aten.div, aten.pow, aten.neg, aten.rsqrt, aten.erf, aten.exp, aten.square)


class UnfoldRows(Pass):
    """Give folded rows their batch and time axes back, in both graphs.

    1. Matches a view of x [B, T, H] as [B * T, H], from which every path leads through operators that treat rows alike
       (linears, layer norms, activations, sums and products, with parameters or with each other) to a view that gives
       [B, T, ...] back.
    2. Writes the operators over [B, T, H]; both views go.
    So the residual stream is one chain of sums, however a block shapes it inside.
    """

    name = "unfold-rows"
    reason = "Rows that the model folds into one axis keep their batch and time axes."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a fold to remove."""
        return any([_unfold_all(module.graph) for module in program.graphs()])


def _unfold_all(graph: fx.Graph) -> bool:
    modified = False
    for node in [n for n in graph.nodes if _folds(n)]:
        region = _region(node)
        if region is not None:
            _unfold(node, region)
            modified = True
    graph.eliminate_dead_code()
    return modified


def _folds(node: fx.Node) -> bool:
    if not is_op(node, *_VIEWS):
        return False
    before, after = shape_of(node_arg(node, 0)), shape_of(node)
    return len(before) == 3 and len(after) == 2 and before[-1] == after[-1]


def _region(fold: fx.Node) -> set[fx.Node] | None:
    """The operators over folded rows; None where one does not treat rows alike or the rows stay folded."""
    leading = shape_of(node_arg(fold, 0))[:-1]
    found, stack = {fold}, [fold]
    while stack:
        for user in stack.pop().users:
            if user in found or _gives_back(user, leading):
                continue
            if not _treats_rows_alike(user):
                return None
            found.add(user)
            stack.append(user)
    # An activation from outside would keep its folded shape [B * T, H].
    others = {a for n in found - {fold} for a in n.all_input_nodes} - found
    return found if len(found) > 1 and all(a.op == "get_attr" for a in others) else None


def _gives_back(node: fx.Node, leading: tuple[int, ...]) -> bool:
    return is_op(node, *_VIEWS) and len(shape_of(node)) > 2 and shape_of(node)[:2] == leading


def _treats_rows_alike(node: fx.Node) -> bool:
    if is_op(node, aten.linear):
        return all(n.op == "get_attr" for n in node.all_input_nodes[1:])
    if is_op(node, aten.layer_norm, aten.rms_norm):
        return len(cast("list[int]", node.args[1])) == 1
    if is_op(node, aten.mean):
        return node.args[1] == [-1] and node.args[2:] == (True,)
    # A parameter of two axes could have a row for each folded row, and would not broadcast over [B, T, H].
    small = all(n.op != "get_attr" or len(shape_of(n)) < 2 for n in node.all_input_nodes)
    return small and (is_op(node, *_POINTWISE) or activation_of(node) is not None)


def _unfold(fold: fx.Node, region: set[fx.Node]) -> None:
    source = node_arg(fold, 0)
    values = {fold: source}
    leading = shape_of(source)[:-1]
    for node in in_order(fold.graph, region - {fold}):
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values.get(n, n))
        with before(node, UnfoldRows.name) as emit:
            values[node] = emit(cast("Callable[..., object]", node.target), *args, **kwargs)
    # The view that gave [B, T, ...] back may also split the last axis into heads; then a reshape is left.
    for node in [u for n in values for u in n.users if _gives_back(u, leading) and u not in region]:
        whole, shape = values[node_arg(node, 0)], list(shape_of(node))
        if tuple(shape) != shape_of(whole):
            with before(node, UnfoldRows.name) as emit:
                whole = emit(aten.reshape.default, whole, shape)
        node.replace_all_uses_with(whole)
