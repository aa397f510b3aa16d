"""Weights that a model computes from its parameters, such as those of weight normalisation, are computed once."""

import torch
from torch import Tensor, fx

from fastcar_compile.ir.dataflow import ancestors, descendants, evaluate
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op
from fastcar_compile.ir.rewrite import attribute

aten = torch.ops.aten
_READERS = (aten.linear, aten.matmul, aten.mm, aten.addmm, aten.embedding, aten.layer_norm, aten.rms_norm)
_VIEWS = (aten.t, aten.transpose, aten.permute, aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.slice)


class FoldWeights(Pass):
    """Compute weights that follow from parameters alone, in both graphs.

    1. Matches what a linear, another product, a lookup or a norm reads, where it follows from parameters and constants
       alone: weight and spectral normalisation, other parametrisations, masks of pruning.
    2. Views of one parameter stay what they are: the next passes know them. So does what follows from a checkpoint's
       parameters, which are not in memory.
    3. Makes a parameter of the value, one for both graphs.
    """

    name = "fold-weights"
    reason = "Weights that follow from parameters alone are computed when the model is compiled."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a weight to compute."""
        modified, made = False, dict[str, list[Tensor]]()
        for module in program.graphs():
            varying = descendants(*module.graph.find_nodes(op="placeholder"))
            readers = [n for n in module.graph.nodes if n in varying and is_op(n, *_READERS)]
            found = [(n, w) for n in readers for w in n.all_input_nodes if w not in varying and _computes(w)]
            modified |= any([_fold(module, node, weight, made) for node, weight in found])
            module.graph.eliminate_dead_code()
        return modified


def _computes(node: fx.Node) -> bool:
    parts = ancestors(node)
    computed = any(n.op == "call_function" and not is_op(n, *_VIEWS) for n in parts)
    return computed and any(n.op == "get_attr" for n in parts)


def _fold(module: fx.GraphModule, reader: fx.Node, node: fx.Node, made: dict[str, list[Tensor]]) -> bool:
    value = evaluate(module, node, {})
    if value is None:
        return False
    # Named after a parameter that it follows from. The second graph and other readers find an equal value.
    base = min(str(n.target) for n in ancestors(node) if n.op == "get_attr")
    known = made.setdefault(base, [])
    number = next((i for i, other in enumerate(known) if torch.equal(other, value)), len(known))
    known += [value.detach().contiguous()] * (number == len(known))
    with module.graph.inserting_before(reader):
        new = attribute(module, f"{base}_folded_{number}", known[number], reader, FoldWeights.name)
    reader.replace_input_with(node, new)
    return True
