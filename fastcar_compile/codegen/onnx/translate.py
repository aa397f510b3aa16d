"""Translation of a captured graph to ONNX: what `torch.onnx.export` does, without what our graphs do not need.

- Its table of translations has those that the graph needs. onnxscript parses every function of the table for fields
  that the table does not keep; that is left out.
- Operators without a translation are decomposed, which traces the graph again. A graph without them is not traced.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from inspect import isfunction
from operator import getitem
from typing import Any, cast

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import rewriter
from onnxscript.function_libs.torch_lib import ops, registration
from onnxscript.optimizer import _constant_folding
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _core, _fx_passes
from torch.onnx._internal.exporter import _registration as exporter
from torch.onnx._internal.exporter._torchlib import _torchlib_registry

from fastcar_compile.codegen.onnx import attention, linear
from fastcar_compile.codegen.onnx.linear import Value

aten = torch.ops.aten


Definition = Callable[..., Value]
"""Takes the operator's arguments by the names of its schema."""


def translation_table() -> dict[OpOverload, Definition]:
    """Return the definition of every operator that has one: a function of its name in these modules."""
    functions = {**vars(attention), **vars(linear)}
    names = [name for name, value in functions.items() if isfunction(value) and hasattr(torch.ops.fastcar, name)]
    return {getattr(torch.ops.fastcar, name).default: functions[name] for name in names}


# onnxscript's optimiser with rewrite rules that look at the kind of a node first.
#
# Its own rules compare whole patterns at every node, nearly all of which are for other operators. That took a third
# of the time of an export. The passes and what they make are the same.


def optimize(model: ir.Model) -> None:
    """Run the passes of `onnxscript.optimizer.optimize_ir`, in its order."""
    again = (
        _constant_folding.FoldConstantsPass(
            shape_inference=True,
            input_size_limit=_constant_folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
            output_size_limit=_constant_folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
        ),
        rewriter.RewritePass(_rules()),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
    )
    ir.passes.Sequential(
        # The functions of onnxscript are inlined first; folding and rewriting look at single operators.
        common.InlinePass(),
        ir.passes.PassManager(again, steps=2, early_stop=True),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


@cache
def _rules() -> RewriteRuleSet:
    return RewriteRuleSet([_quick(rule) for rule in rewriter._DEFAULT_REWRITE_RULES])


def _quick(rule: RewriteRule) -> RewriteRule:
    """Return a rule that compares its pattern only at nodes of the operator that the pattern begins with."""
    # A copy, because the rules belong to onnxscript and serve other exports in this process.
    quick: Any = copy.copy(rule)
    kind = rule._target_pattern.output_nodes[0].op

    def try_rewrite(model: ir.Model, place: ir.Graph | ir.Function, node: ir.Node, **options: Any) -> Any:
        return rule.try_rewrite(model, place, node, **options) if kind.matches(node.op_type) else None

    quick.try_rewrite = try_rewrite
    return quick


Operator = Callable[..., Any]
"""An ATen operator, or a function of Python."""

OPSET = 18

_LIBRARY = ops.__name__
"""Importing it fills onnxscript's registry."""


_BUILT_IN = (getitem, torch.ops.higher_order.cond)
"""Translated by the exporter itself."""


def translate(exported: ExportedProgram, traced: Callable[[], ExportedProgram] | None = None) -> onnx.ModelProto:
    """Return the optimised ONNX model of a captured graph.

    Args:
        exported: the graph. traced: returns it as torch.export traces it, which decompositions need; None: it is that.

    Raises:
        torch.onnx.errors.OnnxExporterError: an operator has no translation.
    """
    # Asserts have no translation.
    _fx_passes.remove_assertion_nodes(exported.graph_module)
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule)]
    for graph in graphs:
        _plain_casts(graph)
    # An operator without a translation is decomposed by the exporter, which needs a graph that torch.export traced.
    if not _targets(graphs) <= _translated():
        whole = exported if traced is None else traced()
        return _core.export(whole, registry=translations(), opset_version=OPSET, verbose=False).model_proto
    # ATen promotes types inside of an operator, ONNX never does.
    _fx_passes.insert_type_promotion_nodes(exported.graph_module)
    table = translations(_targets(graphs))
    program = _core._exported_program_to_onnx_program(exported, registry=table)
    optimize(program.model)
    return program.model_proto


def _targets(graphs: Sequence[fx.Graph]) -> frozenset[Operator]:
    nodes = (n for graph in graphs for n in graph.nodes if n.op == "call_function")
    return frozenset(cast(Operator, n.target) for n in nodes)


def _plain_casts(graph: fx.Graph) -> None:
    """Replace `to`, which has no translation, by the cast that it is, or by nothing."""
    for node in graph.find_nodes(op="call_function", target=aten.to.dtype):
        # `to` with a copy or a memory format is more than a cast.
        if len(node.args) != 2 or node.kwargs:
            continue
        value, dtype = node.args
        cast = value
        if isinstance(value, fx.Node) and value.meta["val"].dtype != dtype:
            with graph.inserting_before(node):
                cast = graph.create_node(
                    "call_function", aten._to_copy.default, (value,), {"dtype": dtype}, name="_to_copy"
                )
            cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast)
        graph.erase_node(node)


@cache
def translations(targets: frozenset[Operator] | None = None) -> exporter.ONNXRegistry:
    """Return the translations of ATen operators, as `ONNXRegistry.from_torchlib` has them, and of `fastcar::` ones.

    Args:
        targets: of these operators only; None: of all. For each, the exporter reads its translation's signature.
    """
    table = exporter.ONNXRegistry()
    table._opset_version = OPSET
    for found in _torchlib_registry.get_torchlib_ops():
        table._register(found.fx_target, found)
    for name, target in _known().items():
        if targets is not None and target not in targets:
            continue
        functions = registration.default_registry[name]
        for function in functions.overloads:
            table._register(target, exporter.OnnxDecompMeta(function, target, None))
        for function in functions.complex:
            table._register(target, exporter.OnnxDecompMeta(function, target, None, is_complex=True))
    # Of several versions of a translation the one for `OPSET` is kept.
    table._cleanup_registry_based_on_opset_version()
    for operator, definition in translation_table().items():
        if targets is None or operator in targets:
            table.register_op(operator, definition)
    return table


@cache
def _known() -> dict[str, Operator]:
    """Return the operators that onnxscript translates, by its own names."""
    names = (name for name in registration.default_registry if not name.startswith("internal::"))
    return {name: target for name in names if (target := exporter._get_overload(name)) is not None}


@cache
def _translated() -> frozenset[Operator]:
    """Return the operators that have a translation, or that the exporter translates itself."""
    own = {found.fx_target for found in _torchlib_registry.get_torchlib_ops() if found.opset_introduced <= OPSET}
    return frozenset({*_BUILT_IN, *own, *_known().values(), *translation_table()})
