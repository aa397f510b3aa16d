"""Remove what means nothing in inference: asserts, no-op casts, aliases, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.rewrite import is_op

aten = torch.ops.aten
_ASSERTS = (aten._assert_tensor_metadata, aten._assert_async, aten._assert_scalar)
_IDENTITIES = (aten.alias, aten.detach, aten.lift_fresh_copy, aten.detach_)


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Drop asserts, and identities whose result has the type, shape and values of its argument."""

    name: ClassVar[str] = "canonicalize"

    def apply(self, program: DecoderProgram) -> bool:
        """Runs after normalize-state: before it, an alias may be a second name of a mutated buffer."""
        return any([_clean(module.graph) for module in program.graphs()])


def _clean(graph: fx.Graph) -> bool:
    before = len(graph.nodes)
    for node in list(graph.nodes):
        if is_op(node, *_ASSERTS):
            graph.erase_node(node)
        elif _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return len(graph.nodes) != before


def _is_identity(node: fx.Node) -> bool:
    if is_op(node, *_IDENTITIES) or (is_op(node, aten.dropout) and node.args[2] is False):
        return True
    if not is_op(node, aten.to, aten._to_copy, aten.contiguous):
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype
