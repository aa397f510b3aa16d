"""Linears whose weight is a parameter, and the same linears with the weight in another format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fastcar_compile.ir.query import is_op, node_arg, optional_arg
from fastcar_compile.ir.rewrite import Edit, call, derived_parameters, replace
from fastcar_compile.ir.weights import Make

aten = torch.ops.aten


def plain_linears(graph: fx.Graph) -> list[fx.Node]:
    """Return the linears whose weight is a parameter: neither computed nor transposed in the graph."""
    return [n for n in graph.nodes if is_op(n, aten.linear) and node_arg(n, 1).op == "get_attr"]


def replace_linear(
    module: fx.GraphModule, node: fx.Node, target: Callable[..., Any], suffixes: tuple[str, ...], make: Make, edit: Edit
) -> None:
    """Replace `linear(x, w, bias)` by `target(x, *make(w), bias)`; the parts are called `<w>_<suffix>`."""
    with module.graph.inserting_before(node):
        parts = derived_parameters(module, node_arg(node, 1), suffixes, make, edit, origin=node)
        arguments = (node_arg(node, 0), *parts, optional_arg(node, 2))
        new = call(module.graph, target, arguments, origin=node, made_by=edit.made_by)
    replace(node, new)
