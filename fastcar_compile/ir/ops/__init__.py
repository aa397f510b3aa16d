"""The `fastcar::` operators: schema, eager definition and fake (meta) definition.

Importing this package registers them. TVM and ONNX definitions are in their codegen folders. Tests compare them with
the eager definitions here. docs/reference/operators.md lists all operators.
"""

from fastcar_compile.ir.ops import attention, draft, exact, gates, linear, offload

__all__ = ["attention", "draft", "exact", "gates", "linear", "offload"]
