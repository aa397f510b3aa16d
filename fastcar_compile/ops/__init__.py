"""The `fastcar::` operators: schema, eager definition and fake (meta) definition.

Importing this package registers them. TVM and ONNX definitions live with their lowerings and are checked
against the eager definitions here.
"""

from fastcar_compile.ops import attention, gates, offload, quant, replay

__all__ = ["attention", "gates", "offload", "quant", "replay"]
