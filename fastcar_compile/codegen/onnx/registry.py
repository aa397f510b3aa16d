"""The exporter's table of translations, made once per process.

`torch.onnx.export` makes it anew for every model. Most of that time goes into texts of functions that are not called:
onnxscript parses each one for a field that the table does not keep.
"""

from __future__ import annotations

from functools import cache

from onnxscript.function_libs.torch_lib import ops, registration
from torch.onnx._internal.exporter import _registration as exporter
from torch.onnx._internal.exporter._torchlib import _torchlib_registry

from fastcar_compile.codegen.onnx.ops import translation_table

OPSET = 18

_LIBRARY = ops.__name__
"""Importing it fills onnxscript's registry."""


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
