"""Weights that a model computes from its parameters, such as those of weight normalisation, are computed once."""

from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.ir.dataflow import ancestors, descendants, evaluate
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op
from fastcar_compile.ir.rewrite import attribute

aten = torch.ops.aten
FOLDED = "_folded_"
"""In the name of a weight that was computed."""


def fold_weights(program: DecoderProgram, made_by: str) -> bool:
    """Make parameters of computed weights and biases that follow from parameters alone, the same for both graphs.

    Sums, norms and products of parameters are computed. Views stay, as other passes know them, and so do elementwise
    operators, and what follows from parameters that are not in memory.

    Returns:
        whether there was a weight to compute.
    """
    modified, made = False, dict[str, list[Tensor]]()
    for module in program.graphs():
        varying = descendants(*module.graph.find_nodes(op="placeholder"))
        readers = [n for n in module.graph.nodes if is_op(n, aten.linear, aten.matmul, aten.addmm, aten.embedding)]
        found = [(n, w) for n in readers for w in n.all_input_nodes if n in varying and w not in varying]
        modified |= any([_fold(module, node, weight, made, made_by) for node, weight in found if _computes(weight)])
        module.graph.eliminate_dead_code()
    return modified


def _computes(node: fx.Node) -> bool:
    parts = ancestors(node)
    operators: list[Any] = [n.target for n in parts if n.op == "call_function" and hasattr(n.target, "_schema")]
    # What an operator returns has an alias where it is a view.
    found = any(op._schema.returns[0].alias_info is None and torch.Tag.pointwise not in op.tags for op in operators)
    return found and any(n.op == "get_attr" for n in parts)


def _fold(module: fx.GraphModule, reader: fx.Node, node: fx.Node, made: dict[str, list[Tensor]], made_by: str) -> bool:
    value = evaluate(module, node, {})
    if value is None:
        return False
    # Named after a parameter that it follows from. The second graph and other readers find an equal value.
    base = min(str(n.target) for n in ancestors(node) if n.op == "get_attr")
    known = made.setdefault(base, [])
    number = next((i for i, other in enumerate(known) if torch.equal(other, value)), len(known))
    known += [value.detach().contiguous()] * (number == len(known))
    with module.graph.inserting_before(reader):
        new = attribute(module, f"{base}{FOLDED}{number}", known[number], reader, made_by)
    reader.replace_input_with(node, new)
    return True
