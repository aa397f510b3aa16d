"""Import of fx graphs: each becomes a Relax function, its operators the calls that the converters emit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import tvm
from torch import fx
from torch.fx.node import Target
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from fastcar_compile.codegen.tvm.call import Call, Context, Value
from fastcar_compile.codegen.tvm.converters import CONVERTERS
from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.relax_api import type_of
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import get_attribute, output_nodes

_COND = torch.ops.higher_order.cond


class SegmentImporter(ExportedProgramImporter):
    """Adds fx graphs to a module as functions.

    A segment is an fx graph whose values are known, so it needs neither an ExportedProgram nor its re-tracing: of TVM's
    importer this uses the converters of single operators, for those that have none here.

    Args:
        builder: the module.
        isa: the instruction set whose kernels are chosen.
    """

    def __init__(self, builder: relax.BlockBuilder, isa: InstructionSet) -> None:
        super().__init__()
        self.block_builder, self._isa = builder, isa

    def knows(self, target: Target) -> bool:
        """Whether an operator can be imported."""
        return target is _COND or target in CONVERTERS or _name(target) in self.convert_map

    def add_function(self, module: fx.GraphModule, name: str, literals: int) -> tvm.ir.GlobalVar:
        """Add a graph of placeholders, operators and branches. Its branches become functions before it does.

        Args:
            module: the graph.
            name: of the function.
            literals: how many arguments it takes after its placeholders. Its branches take the same.

        Raises:
            CompileError: TVM cannot import an operator.
        """
        # The arms of an `If` are calls: a branch is a function of its own, which takes what `cond` passes.
        branches = {
            node: self.add_function(_branch(module, node), f"{name}_{node.target}", literals)
            for node in module.graph.find_nodes(op="get_attr")
        }
        placeholders = module.graph.find_nodes(op="placeholder")
        arguments = [relax.Var(n.name, type_of(n.meta["val"])) for n in placeholders]
        # Literals are integers or texts, known when the entry calls the function.
        own = [relax.Var(f"literal_{i}", relax.AnyType()) for i in range(literals)]
        values: dict[fx.Node, Any] = {**branches, **dict(zip(placeholders, arguments, strict=True))}
        # TVM's converters look up their operands in `env`.
        self.env = values
        with self.block_builder.function(name, [*arguments, *own]):
            for node in [n for n in module.graph.nodes if n.op == "call_function"]:
                values[node] = self._emit(node, own)
            results = [values[n] for n in output_nodes(module.graph)]
            self.block_builder.emit_func_output(results[0] if len(results) == 1 else results)
        return self.block_builder.get().get_global_var(name)

    def _emit(self, node: fx.Node, literals: Sequence[relax.Var]) -> Value:
        if node.target is _COND:
            return self._emit_cond(node, literals)
        context = Context(self.block_builder, self._isa, self.env, literals, self._stock)
        converter = CONVERTERS.get(node.target)
        return self._stock(node) if converter is None else converter(Call(node, context))

    def _stock(self, node: fx.Node) -> relax.Expr:
        """Return what TVM's own converter makes of the node. What it refuses is told as the model's fault.

        A failed assertion of a converter of this package is a defect, and stays what it is.

        Raises:
            CompileError: the converter refuses the node's arguments.
        """
        try:
            return self.convert_map[_name(node.target)](node)
        except (AssertionError, NotImplementedError, ValueError) as error:
            raise CompileError(f"TVM cannot import {node.target}: {error}", where=where(node)) from error

    def _emit_cond(self, node: fx.Node, literals: Sequence[relax.Var]) -> relax.Var:
        """Emit an `If` whose branches call the branches' functions."""
        condition, true, false, operands = cast("tuple[fx.Node, fx.Node, fx.Node, Sequence[fx.Node]]", node.args)
        arguments = [*(self.env[n] for n in operands), *literals]
        # The condition is `replay.all()`: the true branch copies the cache, the false branch computes.
        then, otherwise = (relax.Call(self.env[branch], arguments) for branch in (true, false))
        return self.block_builder.emit(relax.If(self.env[condition], then, otherwise))


def _name(target: Target) -> str:
    """Return the name by which TVM's importer knows an operator: without its namespace."""
    return target if isinstance(target, str) else target.__name__


def _branch(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    branch = get_attribute(module, str(node.target))
    assert isinstance(branch, fx.GraphModule)
    return branch
