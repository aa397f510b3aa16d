"""The `fastcar::` operators: schema, eager definition and fake (meta) definition.

Importing this package registers them. TVM and ONNX definitions are in their codegen folders. Tests compare them with
the eager definitions here. docs/reference/operators.md lists all operators.
"""

from fastcar_compile.ops import (
    activations,
    attention,
    context,
    exact,
    gates,
    linear_bf16,
    offload,
    offload_gate,
    offload_linear,
    quant,
    replay,
    window,
)

__all__ = [
    "activations",
    "attention",
    "context",
    "exact",
    "gates",
    "linear_bf16",
    "offload",
    "offload_gate",
    "offload_linear",
    "quant",
    "replay",
    "window",
]
