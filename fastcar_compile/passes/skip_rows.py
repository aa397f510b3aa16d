"""Rows that replay are zero in the compute branch, and kernels do not multiply rows of zeros."""

from dataclasses import dataclass

import torch
from torch import fx

from fastcar_compile.ir.dataflow import descendants, in_order
from fastcar_compile.ir.ops.linear import FLOAT_LINEARS, INTEGER_LINEARS
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import branches_of, is_op, node_arg, placeholder, shape_of
from fastcar_compile.ir.rewrite import after, before

aten = torch.ops.aten
_BIAS = {aten.layer_norm: 3, aten.linear: 2} | FLOAT_LINEARS | INTEGER_LINEARS
"""Operator -> place of the bias among its arguments."""


@dataclass(frozen=True)
class SkipRows(Pass):
    """Zero the inactive rows of a compute branch: those that replay. Kernels do not multiply rows of zeros.

    1. Matches the compute branch of every layer that replays, where rows decide on their own: more than one row, or
       more than one coupled pair.
    2. Puts `where(replay, 0, hidden)` in the place of the branch's input. The branch's result does not use these rows.
    3. A root-mean-square norm and linears without biases keep such a row zero. A bias does not: after a norm or a
       linear that has one, the rows are zeroed again in front of the next linear.

    Options:
        couple_cfg: rows b and b + B / 2 replay only together.
    """

    name = "skip-rows"
    reason = "Rows that replay are zero in the compute branch, and kernels do not multiply rows of zeros."
    couple_cfg: bool = False

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a branch to rewrite."""
        # With one decision, at batch 1 or for one coupled pair, the branch runs only when every row computes.
        decisions = program.config.batch_size // (2 if self.couple_cfg else 1)
        branches = branches_of(program.graph_module).items() if decisions > 1 else ()
        return any([_zero_rows(branch) for name, branch in branches if name.startswith("compute_branch_")])


def _zero_rows(branch: fx.GraphModule) -> bool:
    """Return False where it was done before."""
    graph = branch.graph
    if any(node.meta.get("made_by") == SkipRows.name for node in graph.nodes):
        return False
    hidden, replay = placeholder(graph, "hidden"), placeholder(graph, "replay")
    # The search comes first: it follows the readers of `hidden`, which all read the zeroed rows afterwards.
    again = _linears_after_a_bias(graph, hidden)
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with after(last, SkipRows.name, origin=next(iter(hidden.users))) as emit:
        zero = emit(aten.full.default, [1], 0.0, dtype=torch.float32)
    # The choice itself must go on reading the input of the branch.
    kept = _kept(zero, replay, zero, hidden)
    hidden.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
    known = {hidden: kept}
    for linear in again:
        x = node_arg(linear, 0)
        # Gate and up read one value, which is zeroed once.
        if x not in known:
            known[x] = _kept(x, replay, zero, x)
        linear.replace_input_with(x, known[x])
    branch.recompile()
    return True


def _linears_after_a_bias(graph: fx.Graph, hidden: fx.Node) -> list[fx.Node]:
    """Linears whose input need not be zero where `hidden` is."""
    moved: set[fx.Node] = set()
    found: list[fx.Node] = []
    for node in in_order(graph, descendants(hidden) - {hidden}):
        if moved & set(node.all_input_nodes):
            # The linear gets zeroed rows again, so from here on only its own bias makes them differ from zero.
            if is_op(node, *(_BIAS.keys() - {aten.layer_norm})):
                found.append(node)
            else:
                moved.add(node)
        # A norm or a linear with a bias.
        place = next((place for op, place in _BIAS.items() if is_op(node, op)), len(node.args))
        if len(node.args) > place and node.args[place] is not None:
            moved.add(node)
    return found


def _kept(at: fx.Node, replay: fx.Node, zero: fx.Node, x: fx.Node) -> fx.Node:
    """x with zeros in the rows that replay, behind the node `at`."""
    batch, *others = shape_of(x)
    with before(at.next, SkipRows.name, origin=next(iter(x.users))) as emit:
        return emit(aten.where.self, emit(aten.view.default, replay, [batch, *[1] * len(others)]), zero, x)
