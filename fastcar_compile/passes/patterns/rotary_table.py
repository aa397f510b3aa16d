"""The cosines and sines of every position, as a graph computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fastcar_compile.ir.query import ancestors, evaluate, in_order, placeholder
from fastcar_compile.passes.patterns.algebra import shape
from fastcar_compile.passes.patterns.rotary import rotary

TOLERANCE = 1e-5
"""Between the two graphs, and between two calls: their angles may differ in the last bit."""


@dataclass(frozen=True)
class Rotation:
    """One rotary embedding: its sum, what it rotates, and the nodes of its cosines and sines [1 or B, 1, T, R]."""

    node: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def rotations(graph: fx.Graph) -> list[Rotation]:
    """Return the rotary embeddings of a graph, in order."""
    return [Rotation(node, *found) for node in graph.nodes if (found := rotary(node)) is not None]


def position_table(module: fx.GraphModule, rotation: Rotation, rows: int) -> Tensor | str:
    """Return float32 [rows, R]: of every position R / 2 cosines, then R / 2 sines; or why there is no such table."""
    position = placeholder(module.graph, "position")
    inputs = {n for n in ancestors(rotation.cos, rotation.sin) if n.op == "placeholder"}
    if inputs != {position}:
        return "its angles depend on more than the position"
    # One call gives the angles of `steps` positions. The last call may pass the end of the table.
    steps = shape(rotation.cos)[2]
    parts = [_angles(module, rotation, position, start) for start in range(0, rows, steps)]
    if any(part is None for part in parts):
        return "its angles depend on a weight that is not in memory"
    table = torch.cat([part for part in parts if part is not None])[:rows]
    # Elements c and c + R / 2 of a head are rotated by one angle, so the table keeps one half of each.
    cos, sin = table.chunk(2, 1)
    if not all(torch.equal(*part.chunk(2, 1)) for part in (cos, sin)):
        return "the two halves of a head have different angles"
    # The calls above start at multiples of `steps`. Another start must give the same rows of the table.
    for start in {1 % rows, rows // 2}:
        again = _angles(module, rotation, position, start)
        if again is None or not _alike(again[: rows - start], table[start : start + steps]):
            return "its angles are no function of the position alone"
    half = shape(rotation.cos)[3] // 2
    return torch.cat([cos[:, :half], sin[:, :half]], 1).contiguous()


def _angles(module: fx.GraphModule, rotation: Rotation, position: fx.Node, start: int) -> Tensor | None:
    """Return cosines and sines float32 [T, 2 R] of a call at position `start`."""
    known = {position: torch.tensor([start])}
    shared = in_order(module.graph, ancestors(rotation.cos) & ancestors(rotation.sin))
    for node in shared[-1:]:  # what both follow from is computed once
        value = evaluate(module, node, known)
        known |= {} if value is None else {node: value}
    parts = [evaluate(module, node, known) for node in (rotation.cos, rotation.sin)]
    if any(part is None for part in parts):
        return None
    # Batch row 0 stands for all rows: nothing but the position goes into the angles.
    return torch.cat([part[0, 0].float() for part in parts if part is not None], 1)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=TOLERANCE)


def same_tables(a: Tensor, b: Tensor) -> bool:
    """Return whether two graphs have the same angles."""
    return _alike(a, b)
