"""An embedding table of bfloat16 values is stored as such: half the bytes, and the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, get_attribute
from fastcar_compile.ir.rewrite import attribute, call, is_op, node_arg
from fastcar_compile.ir.weights import LazyWeights, blocks_of_rows, quantized
from fastcar_compile.passes.quantize import rename_sites

aten = torch.ops.aten
_SUFFIX = "bf16"


@dataclass(frozen=True)
class NarrowEmbedding(Pass):
    """`embedding(table, ids)` -> `embedding(table as bfloat16, ids)` as float32, in both graphs.

    Only where every value of the table is a bfloat16 number, as those of a bfloat16 checkpoint are, and nothing else
    reads it: no result changes.
    """

    name: ClassVar[str] = "narrow-embedding"

    def apply(self, program: DecoderProgram) -> bool:
        """Tables are judged once for both graphs."""
        found = [(module, node) for module in program.graphs() for node in _lookups(module)]
        tables = {str(node_arg(node, 0).target): module for module, node in found}
        exact = {t for t, module in tables.items() if _is_bfloat16(module, t, program.lazy)}
        for module, node in found:
            if str(node_arg(node, 0).target) not in exact:
                continue
            new = _narrow(module, node, program.lazy, self.name)
            if module is program.graph_module:
                rename_sites(program, {node.name: new.name})
            module.graph.erase_node(node)
            module.graph.eliminate_dead_code()
        return bool(exact)


def _lookups(module: fx.GraphModule) -> list[fx.Node]:
    """Lookups in float32 tables that only lookups read."""
    readers: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), []).extend(node.users)
    lookups = [n for n in module.graph.nodes if is_op(n, aten.embedding) and node_arg(n, 0).op == "get_attr"]
    return [
        n
        for n in lookups
        if node_arg(n, 0).meta["val"].dtype == torch.float32
        and all(is_op(user, aten.embedding) for user in readers[str(node_arg(n, 0).target)])
    ]


def _is_bfloat16(module: fx.GraphModule, target: str, lazy: LazyWeights | None) -> bool:
    value = get_attribute(module, target)
    assert isinstance(value, Tensor)
    for rows in blocks_of_rows(value.shape):
        part = lazy.source.read(target, rows) if lazy is not None and value.is_meta else value[slice(*rows)]
        if not torch.equal(_as_bfloat16(part)[0].float(), part):
            return False
    return True


def _as_bfloat16(weight: Tensor) -> tuple[Tensor]:
    return (weight.to(torch.bfloat16),)


def _narrow(module: fx.GraphModule, node: fx.Node, lazy: LazyWeights | None, made_by: str) -> fx.Node:
    """Puts the float32 rows of the narrow table in the place of the lookup, and returns them."""
    target = str(node_arg(node, 0).target)
    value = get_attribute(module, target)
    assert isinstance(value, Tensor)
    name = f"{target}_{_SUFFIX}"
    if lazy is not None and value.is_meta:
        lazy.derive([name], target, _as_bfloat16)
    with module.graph.inserting_before(node):
        (narrow,) = quantized(_as_bfloat16, value)
        table = attribute(module, name, narrow, node, made_by)
        options = {"origin": node, "made_by": made_by}
        rows = call(module.graph, aten.embedding.default, (table, *node.args[1:]), **options)
        wide = call(module.graph, aten._to_copy.default, (rows,), dtype=torch.float32, **options)
    node.replace_all_uses_with(wide)
    return wide
