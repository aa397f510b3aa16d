"""The sum that closes a parallel block: the layer's entry, its attention, and an MLP that does not read attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from fastcar_compile.ir.query import ancestors_until, is_op, value_of

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class ParallelSum:
    """A sum of entry, attention and MLP, in whatever order and association the model adds them.

    `attention` and `mlp` are the summands that follow from the attention `origin` and from the entry alone. Most layers
    have one of each.
    """

    origin: fx.Node
    root: fx.Node
    entry: fx.Node
    attention: tuple[fx.Node, ...]
    mlp: tuple[fx.Node, ...]

    def is_canonical(self) -> bool:
        """Return whether the sum is (entry + attention) + MLP already, with one summand of each kind."""
        operands = self.root.all_input_nodes
        sums = [n for n in operands if is_sum(n) and set(n.all_input_nodes) == {self.entry, *self.attention}]
        return len(self.mlp) == 1 and set(operands) == {*sums, *self.mlp}


def parallel_sums(graph: fx.Graph) -> Iterator[ParallelSum]:
    """Yield the closing sums of the parallel blocks of a graph, in order; each may be rewritten before the next."""
    order = list(graph.nodes)
    starts = [i for i, n in enumerate(order) if is_op(n, fastcar.attention, fastcar.window_attention)]
    windows = [order[start:end] for start, end in pairwise([*starts, len(order)])]
    yield from (found for window in windows if (found := _parallel_sum(window)) is not None)


def is_sum(node: fx.Node) -> bool:
    """Return whether the node adds two values of one shape [B, T, H], neither of them a parameter, without a factor."""
    if not is_op(node, aten.add) or node.kwargs or len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return False
    shapes = {value_of(n).shape for n in (node, *node.all_input_nodes)}
    return len(shapes) == 1 and value_of(node).dim() == 3 and all(n.op != "get_attr" for n in node.all_input_nodes)


def reached_from(start: fx.Node, window: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes of the window that depend on `start`, itself included."""
    reached = {start}
    for node in window:
        if any(a in reached for a in node.all_input_nodes):
            reached.add(node)
    return reached


def _parallel_sum(window: Sequence[fx.Node]) -> ParallelSum | None:
    """The sum that the attention at the start of the window joins, where an MLP joins it beside the attention."""
    origin = window[0]
    reached = reached_from(origin, window)
    # The first sum that adds to attention what does not follow from it.
    joins = (n for n in window if n in reached and is_sum(n) and any(a not in reached for a in n.all_input_nodes))
    join = next(joins, None)
    if join is None:
        return None
    root = _root(join)
    summands = _summands(root)
    attention = tuple(n for n in summands if n in reached)
    others = [n for n in summands if n not in reached]
    entry = _entry(others, origin)
    # A sequential block adds nothing but the entry to its attention; there is no MLP in the same sum.
    if entry is None or len(others) < 2:
        return None
    return ParallelSum(origin, root, entry, attention, tuple(n for n in others if n is not entry))


def _root(join: fx.Node) -> fx.Node:
    """The whole sum. What is read by anything besides the next add is the residual stream."""
    while len(join.users) == 1 and is_sum(user := next(iter(join.users))):
        join = user
    return join


def _summands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for operand in node.all_input_nodes:
        # A sum with a second reader is a value of its own, such as the residual stream of a sequential block.
        inner = is_sum(operand) and len(operand.users) == 1
        found += _summands(operand) if inner else [operand]
    return found


def _entry(others: Sequence[fx.Node], attention: fx.Node) -> fx.Node | None:
    """The summand that attention and all other summands depend on."""
    for node in others:
        if all(node in ancestors_until([other], {node}) for other in (*others, attention)):
            return node
    return None
