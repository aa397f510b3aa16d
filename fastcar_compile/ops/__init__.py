"""The `fastcar::` operators: schema, eager definition and fake (meta) definition.

Importing this package registers them. TVM and ONNX definitions live with their lowerings and are checked
against the eager definitions here.
"""

from fastcar_compile.ops import (
    activations,
    attention,
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
    "gates",
    "linear_bf16",
    "offload",
    "offload_gate",
    "offload_linear",
    "quant",
    "replay",
    "window",
]
