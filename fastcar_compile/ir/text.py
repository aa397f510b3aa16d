"""Readable listings of graphs and programs."""

import operator
from collections.abc import Callable
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fastcar_compile.errors import InputError, InternalError
from fastcar_compile.ir.layers import layer_of, role_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of, source_of
from fastcar_compile.ir.query import branches_of
from fastcar_compile.ir.weights import dtype_name

NAMESPACES = ("aten", "fastcar")
SPECIAL_OPERATORS: dict[str, Any] = {"operator.getitem": operator.getitem, "cond": torch.ops.higher_order.cond}


def graph_to_text(module: fx.GraphModule) -> str:
    """Return one line per node with shape, layer, role, source and the pass that made it; branches follow."""
    lines: list[str] = []
    for node in module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        layer, role = layer_of(node), role_of(node)
        place = "" if layer is None else f"layer {layer}" + (f" {role}" if role else "")
        made = f"made by {node.meta['made_by']}" if "made_by" in node.meta else ""
        notes = ", ".join(note for note in (place, made, module_path_of(node), source_of(node)) if note)
        expression = node.op if node.op == "placeholder" else _expression(node)
        lines.append(f"{node.name}: {_type_text(node)} = {expression}" + (f"  # {notes}" if notes else ""))
    for name, child in branches_of(module).items():
        lines += ["", f"{name}:", indent(graph_to_text(child), "    ", lambda _: True).removesuffix("\n")]
    return "\n".join(lines) + "\n"


def program_to_text(program: DecoderProgram) -> str:
    """Return the listing of the decode step, its outputs and state, and the listing of the prefill chunk."""
    lines = [graph_to_text(program.graph_module), f"outputs: {', '.join(program.outputs)}"]
    lines += [f"state {s.name}: {dtype_name(s.dtype)}{list(s.shape)}" for s in program.state]
    prefill, context = (program.prefill, program.prefill_outputs), (program.context, program.context_outputs)
    for name, (module, outputs) in {"prefill": prefill, "context": context}.items():
        if module is not None:
            text = f"{graph_to_text(module)}outputs: {', '.join(outputs)}"
            lines += ["", f"{name}:", indent(text, "    ", lambda _: True)]
    return "\n".join(lines) + "\n"


def target_name(target: Any) -> str:
    """Return the name of an operator, as listings and graph files write it.

    Raises:
        InternalError: it is neither of ATen nor of this package.
    """
    for name, special in SPECIAL_OPERATORS.items():
        if target is special:
            return name
    name = str(target)
    if isinstance(target, OpOverload) and target.namespace in NAMESPACES:
        return name
    raise InternalError(f"operator {name} cannot be written to a graph file")


def _expression(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"get_attr {node.target}"
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    return f"{target_name(node.target)}({', '.join(arguments)})"


def _type_text(node: fx.Node) -> str:
    val = node.meta.get("val")
    if isinstance(val, Tensor):
        return f"{dtype_name(val.dtype)}{list(val.shape)}"
    return type(val).__name__ if val is not None else "branch"


def explain_node(module: fx.GraphModule, name: str, reason: Callable[[str, str], str]) -> str:
    """Return one node: its operator, shape, source line, module, the pass that made it, its inputs and users.

    Args:
        reason: takes the name of a pass and an operator without its overload, and says why the pass made it.

    Raises:
        InputError: there is no such node in the graph or its branches.
    """
    places = {"decode step": module, **branches_of(module)}.items()
    found = [
        (place, owner, n) for place, owner in places for n in owner.graph.nodes if n.name == name and n.op != "output"
    ]
    if not found:
        raise InputError(f"there is no node {name!r}", hint="list the nodes with `fastcar inspect ARTIFACT --after`")
    place, owner, node = found[0]
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
