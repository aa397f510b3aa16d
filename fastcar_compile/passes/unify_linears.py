"""Products with a constant matrix become `linear`, whatever way round the model stores its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, get_attribute
from fastcar_compile.ir.rewrite import attribute, call, is_op, node_arg
from fastcar_compile.ir.weights import LazyWeights

aten = torch.ops.aten
_PRODUCTS = (aten.addmm, aten.mm, aten.matmul)
_VIEWS = (aten.view, aten.reshape)


@dataclass(frozen=True)
class UnifyLinears(Pass):
    """`addmm(bias, x, w)`, `mm(x, w)` and `matmul(x, w)` with a parameter w [K, N] become `linear(x, w.T, bias)`.

    The views around a product that only fold leading dimensions go, as in transformers' `Conv1D` (GPT-2).
    """

    name: ClassVar[str] = "unify-linears"

    def apply(self, program: DecoderProgram) -> bool:
        """A product of two computed values stays as it is."""
        return any([_unify(module, program.lazy) for module in program.graphs()])


def _unify(module: fx.GraphModule, lazy: LazyWeights | None) -> bool:
    found = [n for n in module.graph.nodes if is_op(n, *_PRODUCTS) and _weight(n) is not None]
    for node in found:
        _replace(module, node, lazy)
    module.graph.eliminate_dead_code()
    return bool(found)


def _weight(node: fx.Node) -> fx.Node | None:
    """The parameter [K, N], or None where there is none, or addmm scales its parts."""
    weight = node.args[-1]
    plain = isinstance(weight, fx.Node) and weight.op == "get_attr" and weight.meta["val"].dim() == 2
    return weight if plain and not node.kwargs else None  # type: ignore[return-value]


def _replace(module: fx.GraphModule, node: fx.Node, lazy: LazyWeights | None) -> None:
    graph, weight = module.graph, node_arg(node, len(node.args) - 1)
    value = get_attribute(module, str(weight.target))
    assert isinstance(value, Tensor)
    x, bias = node_arg(node, len(node.args) - 2), node.args[0] if is_op(node, aten.addmm) else None
    unfolded = _unfolded(node, x)
    name = f"{weight.target}_turned"
    if lazy is not None and value.is_meta:
        lazy.derive((name,), str(weight.target), _turned, by_rows=False)
    with graph.inserting_before(node):
        turned = attribute(module, name, *_turned(value), node, UnifyLinears.name)
        options = {"origin": node, "made_by": UnifyLinears.name}
        arguments = (x if unfolded is None else unfolded, turned, *([] if bias is None else [bias]))
        new = call(graph, aten.linear.default, arguments, **options)
    for user in [node] if unfolded is None else list(node.users):
        user.replace_all_uses_with(new)


def _turned(value: Tensor) -> tuple[Tensor]:
    return (value.t().contiguous(),)


def _unfolded(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """What x was before a view made it two-dimensional, if every user views the product back to that."""
    if not is_op(x, *_VIEWS):
        return None
    before = node_arg(x, 0)
    rows = tuple(before.meta["val"].shape[:-1])
    same = before.meta["val"].shape[-1] == x.meta["val"].shape[-1]
    back = all(is_op(u, *_VIEWS) and tuple(u.meta["val"].shape[:-1]) == rows for u in node.users)
    return before if same and back and node.users else None
