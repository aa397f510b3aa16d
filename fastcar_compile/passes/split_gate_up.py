"""One linear that computes gate and up side by side becomes the two linears of a gated MLP."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, get_attribute
from fastcar_compile.ir.rewrite import activation_of, attribute, call, is_op, node_arg
from fastcar_compile.ir.weights import LazyWeights

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitGateUp(Pass):
    """`gate, up = linear(x, w).chunk(2, -1)` with a parameter w, one half of it activated, becomes two linears (Phi-3).

    Other fused linears (queries, keys and values) stay one product.
    """

    name: ClassVar[str] = "split-gate-up"

    def apply(self, program: DecoderProgram) -> bool:
        """Halves of a computed weight stay as they are."""
        return any([_split(module, program.lazy) for module in program.graphs()])


def _split(module: fx.GraphModule, lazy: LazyWeights | None) -> bool:
    found = [n for n in module.graph.nodes if _is_gate_up(n)]
    for node in found:
        _replace(module, node, lazy)
    module.graph.eliminate_dead_code()
    return bool(found)


def _is_gate_up(node: fx.Node) -> bool:
    if not is_op(node, aten.chunk, aten.split, aten.split_with_sizes):
        return False
    linear = node_arg(node, 0)
    if not is_op(linear, aten.linear) or len(linear.users) > 1:
        return False
    constants = [n for n in linear.args[1:] if isinstance(n, fx.Node)]
    _, size, dim = [*node.args, 0][:3]
    width = linear.meta["val"].shape[-1]
    sizes = (2,) if is_op(node, aten.chunk) else (width // 2, [width // 2] * 2)
    halves = dim in (-1, linear.meta["val"].dim() - 1) and width % 2 == 0 and size in sizes
    taken = all(user.target is operator.getitem for user in node.users)
    activated = any(activation_of(user) for half in node.users for user in half.users)
    return halves and taken and activated and all(n.op == "get_attr" for n in constants)


def _replace(module: fx.GraphModule, node: fx.Node, lazy: LazyWeights | None) -> None:
    linear = node_arg(node, 0)
    for half in list(node.users):
        index = half.args[1]
        with module.graph.inserting_before(half):
            constants = [n for n in linear.args[1:] if isinstance(n, fx.Node)]
            parts = [_half(module, n, int(index), linear, lazy) for n in constants]  # type: ignore[arg-type]
            arguments = (node_arg(linear, 0), *parts)
            new = call(module.graph, aten.linear.default, arguments, origin=linear, made_by=SplitGateUp.name)
        half.replace_all_uses_with(new)


def _half(module: fx.GraphModule, parameter: fx.Node, index: int, origin: fx.Node, lazy: LazyWeights | None) -> fx.Node:
    """The gate's (0) or up's (1) rows of a weight or a bias."""
    value = get_attribute(module, str(parameter.target))
    assert isinstance(value, Tensor)
    names = tuple(f"{parameter.target}_{n}" for n in ("first", "second"))
    if lazy is not None and value.is_meta:
        lazy.derive(names, str(parameter.target), _halves, by_rows=False)
    return attribute(module, names[index], _halves(value)[index], origin, SplitGateUp.name)


def _halves(value: Tensor) -> tuple[Tensor, ...]:
    return tuple(half.contiguous() for half in value.chunk(2, 0))
