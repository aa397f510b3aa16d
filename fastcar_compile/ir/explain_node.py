"""One node of a rewritten graph, as text for people."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fastcar_compile.errors import InputError
from fastcar_compile.ir.provenance import module_path_of, source_of
from fastcar_compile.ir.text import graph_to_text


def explain_node(module: fx.GraphModule, name: str, reason: Callable[[str, str], str]) -> str:
    """Return one node: its operator, shape, source line, module, the pass that made it, its inputs and users.

    Args:
        reason: takes the name of a pass and an operator without its overload, and says why the pass made it.

    Raises:
        InputError: there is no such node in the graph or its branches.
    """
    found = _find(module, name, "decode step")
    if found is None:
        raise InputError(f"there is no node {name!r}", hint="list the nodes with `fastcar inspect ARTIFACT --after`")
    place, owner, node = found
    made_by = str(node.meta.get("made_by", ""))
    listing = next(line for line in graph_to_text(owner).splitlines() if line.startswith(f"{name}:"))
    return "\n".join(
        [
            listing.partition("  #")[0],
            f"  graph    {place}",
            f"  source   {source_of(node) or 'none'}",
            f"  module   {module_path_of(node) or 'none'}",
            f"  made by  {made_by or 'the model'}",
            *([f"  reason   {reason(made_by, str(node.target).removesuffix('.default'))}"] if made_by else []),
            f"  reads    {', '.join(n.name for n in node.all_input_nodes) or 'nothing'}",
            f"  read by  {', '.join(n.name for n in node.users) or 'nothing'}",
        ]
    )


def _find(module: fx.GraphModule, name: str, place: str) -> tuple[str, fx.GraphModule, fx.Node] | None:
    for node in module.graph.nodes:
        if node.name == name and node.op != "output":
            return place, module, node
    for child_name, child in module.named_children():
        if isinstance(child, fx.GraphModule) and (found := _find(child, name, child_name)):
            return found
    return None
