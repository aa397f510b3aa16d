"""Translation of a captured graph to ONNX: what `torch.onnx.export` does, without what our graphs do not need.

- Its table of translations is made once per process, not for each model. onnxscript parses every function of the table
  for fields that the table does not keep; that is left out.
- Operators without a translation are decomposed, which traces the graph again. A graph without them is not traced.
"""

from __future__ import annotations

from functools import cache
from operator import getitem

import onnx
import torch
from onnxscript.function_libs.torch_lib import ops, registration
from torch import fx
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _core, _fx_passes
from torch.onnx._internal.exporter import _registration as exporter
from torch.onnx._internal.exporter._torchlib import _torchlib_registry

from fastcar_compile.codegen.onnx.ops import translation_table

aten = torch.ops.aten
OPSET = 18

_LIBRARY = ops.__name__
"""Importing it fills onnxscript's registry."""


_BUILT_IN = (getitem, torch.ops.higher_order.cond)
"""Translated by the exporter itself."""


def translate(exported: ExportedProgram) -> onnx.ModelProto:
    """Return the optimised ONNX model of a captured graph.

    Raises:
        torch.onnx.errors.OnnxExporterError: an operator has no translation.
    """
    table = translations()
    _fx_passes.remove_assertion_nodes(exported.graph_module)
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule)]
    for graph in graphs:
        _plain_casts(graph)
    targets = {n.target for graph in graphs for n in graph.nodes if n.op == "call_function"}
    if not all(target in _BUILT_IN or table.is_registered(target) for target in targets):
        return _core.export(exported, registry=table, opset_version=OPSET, verbose=False).model_proto
    _fx_passes.insert_type_promotion_nodes(exported.graph_module)
    program = _core._exported_program_to_onnx_program(exported, registry=table)
    program.optimize()
    return program.model_proto


def _plain_casts(graph: fx.Graph) -> None:
    """Replace `to`, which has no translation, by the cast that it is, or by nothing."""
    for node in graph.find_nodes(op="call_function", target=aten.to.dtype):
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
def translations() -> exporter.ONNXRegistry:
    """Return the translations of ATen operators, as `ONNXRegistry.from_torchlib` has them, and of `fastcar::` ones."""
    table = exporter.ONNXRegistry()
    table._opset_version = OPSET
    for found in _torchlib_registry.get_torchlib_ops():
        table._register(found.fx_target, found)
    for name, functions in registration.default_registry.items():
        target = None if name.startswith("internal::") else exporter._get_overload(name)
        if target is None:
            continue
        for function in functions.overloads:
            table._register(target, exporter.OnnxDecompMeta(function, target, None))
        for function in functions.complex:
            table._register(target, exporter.OnnxDecompMeta(function, target, None, is_complex=True))
    table._cleanup_registry_based_on_opset_version()
    for operator, definition in translation_table().items():
        table.register_op(operator, definition)
    return table
