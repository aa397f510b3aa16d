"""Rows that replay are zero in the compute branch, and kernels do not multiply rows of zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.rewrite import call, descendants, in_order, is_op, node_arg, placeholder

aten, fastcar = torch.ops.aten, torch.ops.fastcar
_BIAS = {aten.layer_norm: 3, aten.linear: 2, fastcar.linear_bf16: 2, fastcar.linear_w8a8: 3, fastcar.linear_w4a8: 3}
"""Operator -> place of the bias among its arguments."""


@dataclass(frozen=True)
class SkipRows(Pass):
    """Zero the rows of a compute branch's input that replay; its result does not use them.

    A root-mean-square norm and linears without biases keep such a row zero. A bias does not: after a norm or a linear
    that has one, the rows are zeroed again in front of the next linear. With one row, or one coupled pair, a branch
    never computes only some rows, and stays as it is.

    Options:
        couple_cfg: rows b and b + B / 2 replay only together.
    """

    name: ClassVar[str] = "skip-rows"
    couple_cfg: bool = False

    def apply(self, program: DecoderProgram) -> bool:
        """Layers that never replay have no branch."""
        decisions = program.config.batch_size // (2 if self.couple_cfg else 1)
        layers = [site.layer for site in program.sites if site.replay] if decisions > 1 else []
        branches = [program.graph_module.get_submodule(f"compute_branch_{layer}") for layer in layers]
        return any([_zero_rows(branch) for branch in branches])


def _zero_rows(branch: torch.nn.Module) -> bool:
    """False: it was done before."""
    assert isinstance(branch, fx.GraphModule)
    graph = branch.graph
    if any(node.meta.get("made_by") == SkipRows.name for node in graph.nodes):
        return False
    hidden, replay = placeholder(graph, "hidden"), placeholder(graph, "replay")
    again = _linears_after_a_bias(graph, hidden)
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        zero = call(graph, aten.full.default, ([1], 0.0), dtype=torch.float32, **_origin(next(iter(hidden.users))))
    kept = _kept(graph, zero, replay, zero, hidden)
    hidden.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
    known = {hidden: kept}
    for linear in again:
        x = node_arg(linear, 0)
        if x not in known:
            known[x] = _kept(graph, x, replay, zero, x)
        linear.replace_input_with(x, known[x])
    branch.recompile()
    return True


def _linears_after_a_bias(graph: fx.Graph, hidden: fx.Node) -> list[fx.Node]:
    """Linears whose input need not be zero where `hidden` is."""
    moved: set[fx.Node] = set()
    found = []
    for node in in_order(graph, descendants(hidden) - {hidden}):
        if moved & set(node.all_input_nodes):
            if _is_linear(node):
                found.append(node)
            else:
                moved.add(node)
        if _adds(node):
            moved.add(node)
    return found


def _is_linear(node: fx.Node) -> bool:
    return is_op(node, *(_BIAS.keys() - {aten.layer_norm}))


def _adds(node: fx.Node) -> bool:
    """A norm or a linear with a bias."""
    place = next((place for op, place in _BIAS.items() if is_op(node, op)), len(node.args))
    return len(node.args) > place and node.args[place] is not None


def _kept(graph: fx.Graph, after: fx.Node, replay: fx.Node, zero: fx.Node, x: fx.Node) -> fx.Node:
    """x with zeros in the rows that replay."""
    shape, options = x.meta["val"].shape, _origin(next(iter(x.users)))
    with graph.inserting_after(after):
        mask = call(graph, aten.view.default, (replay, [shape[0], *[1] * (len(shape) - 1)]), **options)
    with graph.inserting_after(mask):
        return call(graph, aten.where.self, (mask, zero, x), **options)


def _origin(node: fx.Node) -> dict[str, object]:
    return {"origin": node, "made_by": SkipRows.name}
