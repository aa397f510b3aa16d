"""Low-rank adapters (LoRA) beside a linear become a part of its weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import evaluate, is_op, node_arg, optional_arg, shape_of, tensor_attribute, value_of
from fastcar_compile.ir.rewrite import attribute, before

aten = torch.ops.aten
_SUFFIX = "_merged"


@dataclass(frozen=True)
class Adapter:
    """`closing = linear(x, w, bias) + scale * up(down(x))`, with down [r, K] and up [N, r] parameters."""

    closing: fx.Node
    linear: fx.Node
    down: fx.Node
    up: fx.Node
    scale: float


class MergeAdapters(Pass):
    """Merge low-rank adapters into the weights of the linears that they stand beside, in all graphs.

    1. Matches `linear(x, w, bias) + scale * linear(linear(x, a), b)`, in any order of sum and product, where a and b
       are parameters and nothing else reads the parts. That is LoRA as peft writes it, and as anybody else does.
    2. Makes `linear(x, w + scale * b @ a, bias)`; the new weight is `<w>_merged`.
    An adapter costs nothing afterwards, and it cannot be switched off or exchanged without compiling again.
    """

    name = "merge-adapters"
    reason = "A low-rank adapter is merged into the weight of its linear, so it costs nothing afterwards."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was an adapter.

        Raises:
            CompileError: the weights are not in memory.
        """
        modified = False
        for module in program.all_graphs():
            for node in list(module.graph.nodes):
                found = _adapter(module, node)
                if found is not None:
                    _merge(module, found)
                    modified = True
            module.graph.eliminate_dead_code()
        return modified


def merged_weights(program: DecoderProgram) -> list[str]:
    """Return the weights that adapters were merged into, by the names that they have in the model."""
    names = [str(n.target).partition(_SUFFIX) for n in program.graph_module.graph.find_nodes(op="get_attr")]
    return list(dict.fromkeys(name for name, suffix, _ in names if suffix))


def _adapter(module: fx.GraphModule, node: fx.Node) -> Adapter | None:
    if not is_op(node, aten.add) or len(node.args) != 2 or len(node.all_input_nodes) != 2:
        return None
    for linear, branch in (node.all_input_nodes, reversed(node.all_input_nodes)):
        # `add(linear, branch, alpha=2)` scales its second operand only.
        factor = node.kwargs.get("alpha", 1) if branch is node.args[1] else 1
        scale, up = _scaled(module, branch)
        down = node_arg(up, 0) if _is_plain(up, bias=False) else None
        if down is None or not _is_plain(down, bias=False) or not _is_plain(linear, bias=True) or linear is branch:
            continue
        # A sum that broadcasts the linear to a larger shape is more than an adapter, and stays.
        alike = node_arg(linear, 0) is node_arg(down, 0) and shape_of(linear) == shape_of(node)
        if alike and isinstance(factor, int | float):
            return Adapter(node, linear, node_arg(down, 1), node_arg(up, 1), factor * scale)
    return None


def _scaled(module: fx.GraphModule, node: fx.Node) -> tuple[float, fx.Node]:
    """The node without factors that are constants, and their product."""
    scale = 1.0
    while is_op(node, aten.mul, aten.div) and len(node.users) == 1 and len(node.args) == 2:
        operands = [_constant(module, argument) for argument in node.args]
        inner = [a for a, value in zip(node.args, operands, strict=True) if value is None and isinstance(a, fx.Node)]
        # `x / c` is a factor 1 / c. `c / x` is none, and ends the search.
        if len(inner) != 1 or (is_op(node, aten.div) and inner[0] is not node.args[0]):
            break
        (factor,) = (value for value in operands if value is not None)
        scale, node = scale / factor if is_op(node, aten.div) else scale * factor, inner[0]
    return scale, node


def _constant(module: fx.GraphModule, value: object) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, fx.Node) and value.op == "get_attr" and value_of(value).numel() == 1:
        known = evaluate(module, value, {})
        return None if known is None else float(known)
    return None


def _is_plain(node: fx.Node, *, bias: bool) -> bool:
    """Whether the node is a linear of a parameter that one node reads; `bias`: it may have one."""
    plain = is_op(node, aten.linear) and len(node.users) == 1 and node_arg(node, 1).op == "get_attr"
    return plain and (bias or optional_arg(node, 2) is None)


def _merge(module: fx.GraphModule, adapter: Adapter) -> None:
    linear, weight = adapter.linear, node_arg(adapter.linear, 1)
    w, a, b = (tensor_attribute(module, str(n.target)) for n in (weight, adapter.down, adapter.up))
    if w.is_meta or a.is_meta or b.is_meta:
        hint = "merge the adapters and save the folder again, or give the loaded model"
        raise error_at(linear, "a LoRA adapter stands beside weights that are on disk", hint)
    # The product and the sum are made in float64, so the weight is rounded once.
    merged = (w.double() + adapter.scale * (b.double() @ a.double())).to(w.dtype)
    with before(adapter.closing, MergeAdapters.name, origin=linear) as emit:
        new_weight = attribute(module, f"{weight.target}{_SUFFIX}", merged, linear, MergeAdapters.name)
        new = emit(aten.linear.default, node_arg(linear, 0), new_weight, *linear.args[2:])
    adapter.closing.replace_all_uses_with(new)
