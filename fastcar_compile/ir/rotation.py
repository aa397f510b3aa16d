"""Rotary position embeddings by meaning: what a graph computes from the position alone, and what that rotates."""

import operator

import torch
from torch import fx

from fastcar_compile.ir.dataflow import ancestors, descendants
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import is_op, node_arg, placeholder, shape_of

aten = torch.ops.aten

_PARTS = (aten.view, aten.slice, aten.clone, operator.getitem, aten.split, aten.unbind, aten.chunk)


class Rotations:
    """The rotations of one graph, in whatever operators they are written.

    Attributes:
        by_position: what follows from the input `position` and from constants alone.
    """

    def __init__(self, graph: fx.Graph) -> None:
        position = placeholder(graph, "position")
        others = [n for n in graph.find_nodes(op="placeholder") if n is not position]
        self.by_position = descendants(position) - descendants(*others)
        self._ends = self.by_position | {n for n in graph.nodes if n.op != "call_function" or _is_projection(n)}

    def of(self, value: fx.Node) -> set[fx.Node]:
        """Return the nodes between a projection and `value` that depend on the position by themselves."""
        rotated = set[fx.Node]()
        # Nodes compare by their place in the graph, so an input is looked at before its reader.
        for node in sorted(ancestors(value, until=self._ends) - self._ends):
            if any(n in rotated or n in self.by_position for n in node.all_input_nodes):
                rotated.add(node)
        return rotated

    def sources(self, value: fx.Node) -> list[fx.Node]:
        """Return what is rotated: the nodes that the rotation of `value` begins with; none: nothing rotates it."""
        rotated = self.of(value)
        inside = rotated | self.by_position
        free = {n for r in rotated for n in r.all_input_nodes if n not in inside and n.op == "call_function"}
        # Halves and their negatives are read too: only the first of the inputs are sources.
        return [n for n in free if not (ancestors(n) - {n}) & free]

    def unrotated(self, attention: fx.Node) -> tuple[fx.Node, bool]:
        """Return the query of an attention from before its rotation, and whether heads are its third axis.

        Returns:
            A node of shape [B, Hq, T, D], or of [B, T, Hq, D] and True.

        Raises:
            CompileError: the query is not rotated, or not from one value of these shapes.
        """
        query = node_arg(attention, 0)
        batch, heads, tokens, dim = shape_of(query)
        found = set(self.sources(query))
        if not found:
            what = "rotary='key' needs rotary embeddings: this query does not depend on the position by itself"
            raise error_at(attention, what, "use rotary='both'")
        swapped = any(_swaps(node) for node in self.of(query))
        wanted = (batch, tokens, heads, dim) if swapped else (batch, heads, tokens, dim)
        # Parts of one query, such as that which does not rotate, come from the same value.
        while (len(found) > 1 or shape_of(*found) != wanted) and is_op(last := max(found), *_PARTS):
            found = found - {last} | {node_arg(last, 0)}
        if len(found) > 1 or shape_of(*found) != wanted:
            what = "rotary='key': the query from before its rotation is not one value of a row for each head"
            raise error_at(attention, what, "use rotary='both'")
        return found.pop(), swapped


def _swaps(node: fx.Node) -> bool:
    """Whether a node exchanges the axes of tokens and heads."""
    if is_op(node, aten.transpose):
        return {axis % 4 for axis in node.args[1:3] if isinstance(axis, int)} == {1, 2}
    return is_op(node, aten.permute) and node.args[1] == [0, 2, 1, 3]


def _is_projection(node: fx.Node) -> bool:
    """A linear of any precision, an embedding, or an attention: what lies behind it is not this layer's rotation."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    named = name.startswith(("linear", "offloaded", "embedding", "attention", "window_attention"))
    return named or is_op(node, aten.addmm, aten.mm, aten.matmul)
