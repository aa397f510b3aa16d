"""Products with a constant matrix become `linear`, however the model writes them and stores the weight."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fastcar_compile.errors import InternalError
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, node_arg, optional_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import Edit, before, derived_parameters, rewrite_each

aten = torch.ops.aten
_PRODUCTS = (aten.addmm, aten.mm, aten.matmul)
_VIEWS = (aten.view, aten.reshape)
_TRANSPOSES = (aten.t, aten.numpy_T, aten.transpose, aten.permute, aten.mT, aten.matrix_H)


class LegalizeLinears(Pass):
    """Write every product with a parameter as a linear, in all graphs.

    1. Matches `addmm(bias, x, w)` without factors, `mm(x, w)` and `matmul(x, w)`, where w [K, N] is a parameter or the
       transpose of one, and `linear(x, w.T)`.
    2. Makes `linear(x, v, bias)` with v [N, K]: the parameter that is transposed (Falcon), or a new one,
       `<w>_transposed`.
    3. Views around the product that only fold leading dimensions go, as in transformers' `Conv1D` (GPT-2).
    4. A parameter [N] that is added to a linear without a bias becomes its bias.
    A product of two computed values stays as it is.
    """

    name = "legalize-linears"
    reason = "A product with a constant matrix becomes one linear, so that later passes see every weight."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a product to rewrite."""
        edit = Edit(self.name, program.lazy)
        # Products go first: a parameter that is added to a product is then one that is added to a linear.
        products = rewrite_each(program.all_graphs(), _matches, lambda module, node: _replace(module, node, edit))
        return rewrite_each(program.all_graphs(), _is_bias, _fold) | products


def _matches(node: fx.Node) -> bool:
    """Return whether the node is a product with a parameter, and none that a backend takes as it is."""
    if is_op(node, aten.linear):
        return _transposed_parameter(node_arg(node, 1)) is not None
    return is_op(node, *_PRODUCTS) and not node.kwargs and _weight(node) is not None


def _weight(node: fx.Node) -> fx.Node | None:
    """The parameter of a product, as it is or transposed; None where there is none."""
    weight = node.args[1] if is_op(node, aten.linear) else node.args[-1]
    if not isinstance(weight, fx.Node) or value_of(weight).dim() != 2:
        return None
    return weight if weight.op == "get_attr" else _transposed_parameter(weight)


def _transposed_parameter(node: fx.Node) -> fx.Node | None:
    """The parameter that the node transposes; None where it does something else."""
    if not is_op(node, *_TRANSPOSES) or value_of(node).dim() != 2:
        return None
    # The strides tell a swap of the two axes from a permutation that moves nothing.
    source = node_arg(node, 0)
    swaps = value_of(node).stride() == value_of(source).stride()[::-1]
    return source if source.op == "get_attr" and swaps else None


def _replace(module: fx.GraphModule, node: fx.Node, edit: Edit) -> None:
    weight = _weight(node)
    if weight is None:
        raise InternalError(f"{node.name} is no product with a parameter")
    is_linear = is_op(node, aten.linear)
    # `addmm(bias, x, w)`, `mm(x, w)`, `matmul(x, w)`: x is the last argument but one.
    x = node_arg(node, 0 if is_linear else len(node.args) - 2)
    bias = [node_arg(node, 0)] if is_op(node, aten.addmm) else list(node.args[2:]) if is_linear else []
    # `view(addmm(bias, view(x, [-1, K]), w), [B, T, N])` becomes `linear(x, v, bias)` over [B, T, K].
    unfolded = None if is_linear else _unfolded(node, x)
    with before(node, edit.made_by) as emit:
        rows = weight
        if is_linear or weight in node.args:  # its rows are the product's inputs, not its outputs
            (rows,) = derived_parameters(module, weight, ("transposed",), _transposed, edit, origin=node, by_rows=False)
        new = emit(aten.linear.default, x if unfolded is None else unfolded, rows, *bias)
    for user in [node] if unfolded is None else list(node.users):
        user.replace_all_uses_with(new)


def _is_bias(node: fx.Node) -> bool:
    """Return whether the node adds a parameter [N] to a linear that has no bias and no other reader."""
    if not is_op(node, aten.add) or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    # The parameter comes last, in whatever order the sum has its operands.
    linear, bias = sorted(node.all_input_nodes, key=lambda n: n.op == "get_attr")
    plain = is_op(linear, aten.linear) and len(linear.users) == 1 and optional_arg(linear, 2) is None
    return plain and bias.op == "get_attr" and shape_of(bias) == shape_of(linear)[-1:]


def _fold(_module: fx.GraphModule, node: fx.Node) -> None:
    linear, bias = sorted(node.all_input_nodes, key=lambda n: n.op == "get_attr")
    with before(node, LegalizeLinears.name, origin=linear) as emit:
        node.replace_all_uses_with(emit(aten.linear.default, *linear.args[:2], bias))


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
