"""Tables that a model reads by position, such as learnt positions: no row past the last one is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from fastcar_compile.ir.query import ancestors, is_op, node_arg, shape_of
from fastcar_compile.ir.rewrite import call

aten, fastcar = torch.ops.aten, torch.ops.fastcar


def limit_table_rows(graph: fx.Graph, position: fx.Node, longest: int, made_by: str) -> None:
    """Limit every index that follows from the position to the rows of the table that it reads.

    The last chunk of a prompt is padded, so its positions may pass the end of a table of max_seq_len rows. Nothing
    uses what the padding gives, but it must not read out of bounds.

    Args:
        longest: max_seq_len and the padding: one more than the largest position of any call.
    """
    for node in list(graph.nodes):
        for index, rows in list(_lookups(node)):
            if rows >= longest or not _follows_from(position, index):
                continue
            with graph.inserting_before(node):
                limited = call(graph, fastcar.limit.default, (index, rows - 1), origin=node, made_by=made_by)
            node.replace_input_with(index, limited)


def _lookups(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield (index, rows of the table) of a lookup."""
    if is_op(node, aten.embedding):
        yield node_arg(node, 1), shape_of(node_arg(node, 0))[0]
    elif is_op(node, aten.index_select):
        yield node_arg(node, 2), shape_of(node_arg(node, 0))[cast("int", node.args[1])]
    elif is_op(node, aten.index):
        indices = cast("list[Any]", node.args[1])
        for axis, index in enumerate(indices):
            if isinstance(index, fx.Node):
                yield index, shape_of(node_arg(node, 0))[axis]


def _follows_from(position: fx.Node, index: fx.Node) -> bool:
    """Whether an int64 index depends on the position, and on no other input."""
    found = ancestors(index)
    inputs = {n for n in found if n.op == "placeholder"}
    return inputs == {position} and index.meta["val"].dtype == torch.int64
