"""Rows that replay are zero in the compute branch, and kernels do not multiply rows of zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.ir import DecoderProgram
from fastcar_compile.passes.base import Pass
from fastcar_compile.passes.edit import call, placeholder

aten = torch.ops.aten


@dataclass(frozen=True)
class SkipRows(Pass):
    """Zero the rows of a compute branch's input that replay; its result does not use them.

    A root-mean-square norm and linears without biases keep such a row zero. With one row, or one coupled pair, a
    branch never computes only some rows, and stays as it is.

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
    shape = hidden.meta["val"].shape
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    options = {"origin": next(iter(hidden.users)), "made_by": SkipRows.name}
    with graph.inserting_after(last):
        mask = call(graph, aten.view.default, (replay, [shape[0], *[1] * (len(shape) - 1)]), **options)
    with graph.inserting_after(mask):
        zero = call(graph, aten.full.default, ([1], 0.0), dtype=torch.float32, **options)
    with graph.inserting_after(zero):
        kept = call(graph, aten.where.self, (mask, zero, hidden), **options)
    hidden.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
    branch.recompile()
    return True
