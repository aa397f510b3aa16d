"""The `fastcar::` operators: schema, eager definition and fake (meta) definition.

Importing this package registers them. TVM and ONNX definitions are in their codegen folders. Tests compare them with
the eager definitions here. docs/reference/operators.md lists all operators.
"""

from fastcar_compile.ir.ops import attention, exact, gates, offload
from fastcar_compile.ir.ops import attention as context
from fastcar_compile.ir.ops import attention as window
from fastcar_compile.ir.ops import gates as replay
from fastcar_compile.ir.ops import linear as activations
from fastcar_compile.ir.ops import linear as linear_bf16
from fastcar_compile.ir.ops import linear as quant
from fastcar_compile.ir.ops import offload as offload_gate
from fastcar_compile.ir.ops import offload as offload_linear

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
