"""An embedding table of bfloat16 values is stored as such: half the bytes, and the same numbers."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, node_arg, tensor_attribute, value_of
from fastcar_compile.ir.rewrite import Edit, before, derived_parameters, replace
from fastcar_compile.ir.weights import LazyWeights, blocks_of_rows
from fastcar_compile.passes.bfloat16_weights import SUFFIX, to_bfloat16

aten = torch.ops.aten


class Bfloat16Embedding(Pass):
    """Store the embedding table as bfloat16, in both graphs.

    1. Matches `embedding(table, ids)` whose table is a float32 parameter that only lookups read.
    2. Every value of the table must be a bfloat16 number, as those of a bfloat16 checkpoint are.
    3. Makes `embedding(table as bfloat16, ids)` as float32. No result changes.
    """

    name = "bfloat16-embedding"
    reason = "The embedding table holds bfloat16 values and is stored as such: half the bytes."

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError where the table has no values to look at. Tables are judged once for both graphs."""
        found = [(module, node) for module in program.graphs() for node in _lookups(module.graph)]
        tables = {str(node_arg(node, 0).target): module for module, node in found}
        exact = {t for t, module in tables.items() if _is_bfloat16(module, t, program.lazy)}
        edit = Edit(self.name, program.lazy)
        for module, node in found:
            if str(node_arg(node, 0).target) in exact:
                _store(module, node, edit)
                module.graph.eliminate_dead_code()
        return bool(exact)


def _lookups(graph: fx.Graph) -> list[fx.Node]:
    """Lookups in float32 tables that only lookups read."""
    # By name, because several nodes may read one parameter. A head that is tied to the table and not quantised reads it
    # as a float32 weight, so that table stays.
    readers: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="get_attr"):
        readers.setdefault(str(node.target), []).extend(node.users)
    lookups = [n for n in graph.nodes if is_op(n, aten.embedding) and node_arg(n, 0).op == "get_attr"]
    return [
        n
        for n in lookups
        if value_of(node_arg(n, 0)).dtype == torch.float32
        and all(is_op(user, aten.embedding) for user in readers[str(node_arg(n, 0).target)])
    ]


def _is_bfloat16(module: fx.GraphModule, target: str, lazy: LazyWeights | None) -> bool:
    value = tensor_attribute(module, target)
    if value.is_meta and lazy is None:
        hint = "leave bfloat16-embedding out, or run it on a graph with weights"
        raise CompileError(f"bfloat16-embedding needs the values of {target}, which are not there", hint=hint)
    # A value is a bfloat16 number if rounding it to bfloat16 gives it back.
    for rows in blocks_of_rows(value.shape):
        part = lazy.source.read(target, rows) if lazy is not None and value.is_meta else value[slice(*rows)]
        if not torch.equal(part.to(torch.bfloat16).float(), part):
            return False
    return True


def _store(module: fx.GraphModule, node: fx.Node, edit: Edit) -> None:
    """Put the float32 rows of the bfloat16 table in the place of the lookup."""
    # Rows are widened behind the lookup: B * T rows of bfloat16, and never the whole table.
    with before(node, edit.made_by) as emit:
        (table,) = derived_parameters(module, node_arg(node, 0), (SUFFIX,), to_bfloat16, edit, origin=node)
        rows = emit(aten.embedding.default, table, *node.args[1:])
        wide = emit(aten._to_copy.default, rows, dtype=torch.float32)
    replace(node, wide)
