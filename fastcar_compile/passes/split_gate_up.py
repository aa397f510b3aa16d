"""One linear that computes gate and up together becomes the two linears of a gated MLP."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import activation_of, is_op, node_arg, shape_of
from fastcar_compile.ir.rewrite import Edit, before, derived_parameters, rewrite_each

aten = torch.ops.aten


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
        return rewrite_each(program.graphs(), _is_gate_up, lambda module, node: _replace(module, node, edit))


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


def _replace(module: fx.GraphModule, node: fx.Node, edit: Edit) -> None:
    linear, names = node_arg(node, 0), ("first", "second")
    with module.graph.inserting_before(linear):
        parts = [
            derived_parameters(module, n, names, _halves, edit, origin=linear, by_rows=False)
            for n in _parameters(linear)
        ]
    for half in list(node.users):
        # `getitem(chunk, 0)` is the half of the first N / 2 outputs, whether the model calls it gate or up.
        own = [p[0] if half.args[1] == 0 else p[1] for p in parts]
        with before(half, edit.made_by, origin=linear) as emit:
            half.replace_all_uses_with(emit(aten.linear.default, node_arg(linear, 0), *own))


def _halves(value: Tensor) -> tuple[Tensor, ...]:
    return tuple(half.contiguous() for half in value.chunk(2, 0))
