"""Products with a constant matrix become `linear`, whatever way round the model stores its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, node_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import Edit, call, rearranged_parameters

aten = torch.ops.aten
_PRODUCTS = (aten.addmm, aten.mm, aten.matmul)
_VIEWS = (aten.view, aten.reshape)


@dataclass(frozen=True)
class LegalizeLinears(Pass):
    """Write every product with a parameter w [K, N] as a linear, in both graphs.

    1. Matches `addmm(bias, x, w)` without factors, `mm(x, w)` and `matmul(x, w)`.
    2. Makes `linear(x, w.T, bias)`; the transposed weight is a parameter of its own, `<w>_transposed`.
    3. Views around the product that only fold leading dimensions go, as in transformers' `Conv1D` (GPT-2).
    A product of two computed values stays as it is.
    """

    name: ClassVar[str] = "legalize-linears"

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a product to rewrite."""
        modified = False
        for module in program.graphs():
            for node in [n for n in module.graph.nodes if is_op(n, *_PRODUCTS) and _weight(n) is not None]:
                _replace(module, node, Edit(self.name, program.lazy))
                modified = True
            module.graph.eliminate_dead_code()
        return modified


def _weight(node: fx.Node) -> fx.Node | None:
    """The parameter [K, N], or None where there is none, or addmm scales its parts."""
    weight = node.args[-1]
    if not isinstance(weight, fx.Node) or weight.op != "get_attr" or node.kwargs:
        return None
    return weight if value_of(weight).dim() == 2 else None


def _replace(module: fx.GraphModule, node: fx.Node, edit: Edit) -> None:
    graph, weight = module.graph, node_arg(node, len(node.args) - 1)
    x = node_arg(node, len(node.args) - 2)
    bias = [node_arg(node, 0)] if is_op(node, aten.addmm) else []
    unfolded = _unfolded(node, x)
    with graph.inserting_before(node):
        (transposed,) = rearranged_parameters(module, weight, ("transposed",), _transposed, edit, origin=node)
        arguments = (x if unfolded is None else unfolded, transposed, *bias)
        new = call(graph, aten.linear.default, arguments, origin=node, made_by=edit.made_by)
    for user in [node] if unfolded is None else list(node.users):
        user.replace_all_uses_with(new)


def _transposed(value: Tensor) -> tuple[Tensor]:
    return (value.t().contiguous(),)


def _unfolded(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """What x was before a view made it two-dimensional, if every user views the product back to that."""
    if not is_op(x, *_VIEWS):
        return None
    before = node_arg(x, 0)
    rows, width = shape_of(before)[:-1], shape_of(before)[-1]
    back = all(is_op(u, *_VIEWS) and shape_of(u)[:-1] == rows for u in node.users)
    return before if width == shape_of(x)[-1] and back and node.users else None
