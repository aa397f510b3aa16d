"""Linears: every product with a parameter becomes one over [B, T, K], with its own weight."""

import operator
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.errors import InternalError
from fastcar_compile.ir.dataflow import in_order
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import activation_of, is_op, node_arg, optional_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import Edit, before, derived_parameters, rewrite_each

aten = torch.ops.aten


_PRODUCTS = (aten.addmm, aten.mm, aten.matmul)
_VIEWS = (aten.view, aten.reshape, aten.flatten, aten._unsafe_view)
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
        products = rewrite_each(program.all_graphs(), _is_product, lambda module, node: _legalize(module, node, edit))
        return rewrite_each(program.all_graphs(), _is_bias, _add_bias) | products


def _is_product(node: fx.Node) -> bool:
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


def _legalize(module: fx.GraphModule, node: fx.Node, edit: Edit) -> None:
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


def _add_bias(_module: fx.GraphModule, node: fx.Node) -> None:
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


_POINTWISE = (aten.add, aten.sub, aten.mul, aten.div, aten.pow, aten.neg, aten.rsqrt, aten.erf, aten.exp, aten.square)


class UnfoldRows(Pass):
    """Give folded rows their batch and time axes back, in both graphs.

    1. Matches a view of x [B, T, H] as [B * T, H], from which every path leads through operators that treat rows alike
       (linears, layer norms, activations, sums and products, with parameters or with each other) to a view that gives
       [B, T, ...] back.
    2. Writes the operators over [B, T, H]; both views go.
    So the residual stream is one chain of sums, however a block shapes it inside.
    """

    name = "unfold-rows"
    reason = "Rows that the model folds into one axis keep their batch and time axes."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a fold to remove."""
        return any([_unfold_all(module.graph) for module in program.graphs()])


def _unfold_all(graph: fx.Graph) -> bool:
    modified = False
    for node in [n for n in graph.nodes if is_op(n, *_VIEWS)]:
        before, after = shape_of(node_arg(node, 0)), shape_of(node)
        if not (len(before) == 3 and len(after) == 2 and before[-1] == after[-1]):
            continue
        region = _region(node)
        if region is not None:
            _unfold(node, region)
            modified = True
    graph.eliminate_dead_code()
    return modified


def _region(fold: fx.Node) -> set[fx.Node] | None:
    """The operators over folded rows; None where one does not treat rows alike or the rows stay folded."""
    leading = shape_of(node_arg(fold, 0))[:-1]
    found, stack = {fold}, [fold]
    while stack:
        for user in stack.pop().users:
            if user in found or _gives_back(user, leading):
                continue
            if not _treats_rows_alike(user):
                return None
            found.add(user)
            stack.append(user)
    # An activation from outside would keep its folded shape [B * T, H].
    others = {a for n in found - {fold} for a in n.all_input_nodes} - found
    return found if len(found) > 1 and all(a.op == "get_attr" for a in others) else None


def _gives_back(node: fx.Node, leading: tuple[int, ...]) -> bool:
    return is_op(node, *_VIEWS) and len(shape_of(node)) > 2 and shape_of(node)[:2] == leading


def _treats_rows_alike(node: fx.Node) -> bool:
    if is_op(node, aten.linear):
        return all(n.op == "get_attr" for n in node.all_input_nodes[1:])
    if is_op(node, aten.layer_norm, aten.rms_norm):
        return len(cast("list[int]", node.args[1])) == 1
    if is_op(node, aten.mean):
        return node.args[1] == [-1] and node.args[2:] == (True,)
    # A parameter of two axes could have a row for each folded row, and would not broadcast over [B, T, H].
    small = all(n.op != "get_attr" or len(shape_of(n)) < 2 for n in node.all_input_nodes)
    return small and (is_op(node, *_POINTWISE) or activation_of(node) is not None)


def _unfold(fold: fx.Node, region: set[fx.Node]) -> None:
    source = node_arg(fold, 0)
    values = {fold: source}
    leading = shape_of(source)[:-1]
    for node in in_order(fold.graph, region - {fold}):
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values.get(n, n))
        with before(node, UnfoldRows.name) as emit:
            values[node] = emit(cast("Callable[..., object]", node.target), *args, **kwargs)
    # The view that gave [B, T, ...] back may also split the last axis into heads; then a reshape is left.
    for node in [u for n in values for u in n.users if _gives_back(u, leading) and u not in region]:
        whole, shape = values[node_arg(node, 0)], list(shape_of(node))
        if tuple(shape) != shape_of(whole):
            with before(node, UnfoldRows.name) as emit:
                whole = emit(aten.reshape.default, whole, shape)
        node.replace_all_uses_with(whole)


class SplitGateUp(Pass):
    """Split the linear that computes gate and up together (Phi-3), in both graphs.

    1. Matches `a, b = linear(x, w, bias).chunk(2, -1)`, and the same as a split, with w and bias parameters.
    2. One of the halves must go into an activation: fused queries, keys and values stay one linear.
    3. Makes `linear(x, w[:N/2], bias[:N/2])` and `linear(x, w[N/2:], bias[N/2:])`.
    """

    name = "split-gate-up"
    reason = "One linear that computes gate and up together becomes the two linears of a gated MLP."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a linear to split."""
        edit = Edit(self.name, program.lazy)
        return rewrite_each(program.graphs(), _is_gate_up, lambda module, node: _split(module, node, edit))


def _is_gate_up(node: fx.Node) -> bool:
    if not is_op(node, aten.chunk, aten.split, aten.split_with_sizes):
        return False
    linear = node_arg(node, 0)
    if not is_op(linear, aten.linear) or len(linear.users) > 1:
        return False
    # The default of `dim` is 0.
    _, size, dim = [*node.args, 0][:3]
    shape = shape_of(linear)
    # `chunk` takes the number of parts, `split` the size of a part, and `split_with_sizes` all sizes.
    sizes: tuple[object, ...] = (2,) if is_op(node, aten.chunk) else (shape[-1] // 2, [shape[-1] // 2] * 2)
    halves = dim in (-1, len(shape) - 1) and shape[-1] % 2 == 0 and size in sizes
    taken = all(user.target is operator.getitem for user in node.users)
    activated = any(activation_of(user) for half in node.users for user in half.users)
    return halves and taken and activated and all(n.op == "get_attr" for n in _parameters(linear))


def _parameters(linear: fx.Node) -> list[fx.Node]:
    return [n for n in linear.args[1:] if isinstance(n, fx.Node)]


def _split(module: fx.GraphModule, node: fx.Node, edit: Edit) -> None:
    linear, names = node_arg(node, 0), ("first", "second")
    with module.graph.inserting_before(linear):
        derive = partial(derived_parameters, module, origin=linear, by_rows=False)
        parts = [
            derive(n, names, lambda v: tuple(h.contiguous() for h in v.chunk(2)), edit) for n in _parameters(linear)
        ]
    for half in list(node.users):
        # `getitem(chunk, 0)` is the half of the first N / 2 outputs, whether the model calls it gate or up.
        own = [p[0] if half.args[1] == 0 else p[1] for p in parts]
        with before(half, edit.made_by, origin=linear) as emit:
            half.replace_all_uses_with(emit(aten.linear.default, node_arg(linear, 0), *own))
