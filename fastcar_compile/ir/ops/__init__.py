"""The `fastcar::` operators: schema, eager definition and fake (meta) definition.

Importing this package registers them. TVM and ONNX definitions are in their codegen folders. Tests compare them with
the eager definitions here. docs/reference/operators.md lists all operators.
"""

import torch

from fastcar_compile.ir.ops import attention, exact, gates, linear, offload

__all__ = ["attention", "exact", "gates", "linear", "offload"]

# oneMKL 2024.2, which torch's wheels hold, chooses the kernel of such a function at its first call. Where two threads
# make that call together, one of them may compute its part with errors of 1e-4 (pytorch/pytorch#188792): a rotary table
# that differs from run to run. One element is computed by one thread.
for _name in ("cos", "sin", "tan", "exp", "expm1", "log", "log1p", "log10", "sqrt", "tanh", "erf", "erfc"):
    for _dtype in (torch.float32, torch.float64):
        getattr(torch, _name)(torch.ones(1, dtype=_dtype))
