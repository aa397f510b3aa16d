"""Cut a decode step into prologue, layers and epilogue, so that each backend lowers identical layers once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fastcar_compile.codegen.part_graph import Part, branch_of, copy_part, part_key
from fastcar_compile.ir.layers import schedule
from fastcar_compile.ir.query import output_nodes


@dataclass(frozen=True)
class Segment:
    """A part of the graph as a function.

    Attributes:
        part: its operators.
        key: equal for segments of equal structure.
        literals: the arguments that name a layer. They are arguments of the function too.
    """

    part: Part
    key: str
    literals: tuple[int | str, ...]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The outer graph's node (or, for parameters, attribute) that each placeholder stands for."""
        return self.part.inputs

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The outer graph's node behind each result."""
        return self.part.outputs

    def copy(self) -> fx.GraphModule:
        """Return the part as a graph of its own, which a backend may rewrite.

        Parameters, state and activations are placeholders, the results are a flat tuple, and nodes are named by
        position. A literal is replaced by its index in `literals`, as a number or as text.
        """
        return copy_part(self.part)


def segment(module: fx.GraphModule) -> list[Segment]:
    """Return the part before the layers, one segment per layer, and the part behind them, as `schedule` cuts them."""
    stages = schedule(module.graph)
    results = set(output_nodes(module.graph))
    parts = [stages.before, *stages.layers, stages.behind]
    return [_extract(module, part, results) for part in parts if part]


def _extract(module: fx.GraphModule, nodes: tuple[fx.Node, ...], results: set[fx.Node]) -> Segment:
    """Return the nodes of one part as a segment. Inputs are in the order of their first use, so equal parts agree."""
    inside = set(nodes)
    read: dict[fx.Node, None] = {}
    for node in nodes:
        read |= dict.fromkeys(a for a in node.all_input_nodes if a not in inside)
    branches = {n: b for n in read if (b := branch_of(module, n)) is not None}
    outputs = (n for n in nodes if n in results or any(u not in inside and u.op != "output" for u in n.users))
    part = Part(nodes, tuple(n for n in read if n not in branches), tuple(outputs), branches)
    key, literals = part_key(part)
    return Segment(part, key, tuple(literals))
