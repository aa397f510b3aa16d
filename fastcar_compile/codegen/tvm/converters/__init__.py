"""Converters: each makes of one call of one operator the Relax calls of its kernels."""

import fastcar_compile.codegen.tvm.fusion  # noqa: F401  (registers the fused operators, which have converters too)
from fastcar_compile.codegen.tvm.converters import attention, basic, cache, functions, gate, linear, norm, offload
from fastcar_compile.codegen.tvm.converters.registry import CONVERTERS, Converter

__all__ = [
    "CONVERTERS",
    "Converter",
    "attention",
    "basic",
    "cache",
    "functions",
    "gate",
    "linear",
    "norm",
    "offload",
]
