"""Converters: each makes of one call of one operator the Relax calls of its kernels."""

import fastcar_compile.codegen.tvm.converters.state  # noqa: F401  (registers converters, as `numeric` does)
from fastcar_compile.codegen.tvm.converters.numeric import CONVERTERS

__all__ = ["CONVERTERS"]
