"""A decode step must be a function of its inputs: what draws random numbers is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import is_op

aten = torch.ops.aten
_DROPOUT = (aten.dropout, aten.native_dropout, aten.alpha_dropout, aten.feature_dropout)
_DRAWS: tuple[Any, ...] = (aten.rand, aten.randn, aten.randint, aten.rand_like, aten.randn_like, aten.bernoulli)
_DRAWS += (aten.multinomial, aten.normal, aten.uniform_, aten.bernoulli_, aten.normal_, aten.exponential_)


def check_deterministic(graph: fx.Graph) -> None:
    """Raise CompileError with every operator that draws random numbers."""
    problems: list[CompileError] = []
    for node in graph.nodes:
        # The third argument is `train`; it must be False literally.
        if is_op(node, *_DROPOUT) and node.args[2:3] != (False,):
            what = "dropout is active in a model that is not training"
            hint = "use nn.Dropout, or give F.dropout training=self.training: its default is True"
            problems.append(CompileError(what, where=where(node), hint=hint))
        elif is_op(node, *_DRAWS):
            what = f"the decode step draws random numbers ({node.target})"
            hint = "return logits from the step, and sample outside of it"
            problems.append(CompileError(what, where=where(node), hint=hint))
    if problems:
        raise CompileError.collect(problems)
