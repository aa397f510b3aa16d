"""split-quantized-linears: a quantised linear becomes the quantisation of its rows and an integer product.

Linears that share their rows share one quantisation, and the steps after this one can fuse it with what makes the rows.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fastcar_compile.codegen.tvm.fusion.rewrite import replace
from fastcar_compile.ir.rewrite import call
from fastcar_compile.ir.schema import bound

fastcar = torch.ops.fastcar
NAME = "split-quantized-linears"
QUANTIZED_LINEARS = frozenset({fastcar.linear_w8a8.default, fastcar.linear_w4a8.default})


def split_quantized_linears(graph: fx.Graph) -> None:
    """Replace every `linear_w8a8` and `linear_w4a8`."""
    rows: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in list(graph.nodes):
        if node.target not in QUANTIZED_LINEARS:
            continue
        arguments = bound(node)
        x = arguments.pop("x")
        assert isinstance(x, fx.Node)
        # q, k and v, or gate and up, read one x: its rows are quantised once.
        if x not in rows:
            rows[x] = _quantized(node, x)
        replace(node, fastcar.integer_linear.default, (*rows[x], *arguments.values()), NAME)


def _quantized(linear: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return rows and scales of x, placed before the first linear that reads them."""
    graph = linear.graph
    with graph.inserting_before(linear):
        both = call(graph, fastcar.quantize_rows.default, (x,), origin=linear, made_by=NAME)
        rows, scales = (call(graph, operator.getitem, (both, i), origin=linear, made_by=NAME) for i in range(2))
    return rows, scales
