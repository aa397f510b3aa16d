"""Converters: each makes of one call of one operator the Relax calls of its kernels."""

import fastcar_compile.codegen.tvm.fused_operators  # noqa: F401  (registers the fused operators, which have converters too)
from fastcar_compile.codegen.tvm.converters import numeric as basic
from fastcar_compile.codegen.tvm.converters import numeric as functions
from fastcar_compile.codegen.tvm.converters import numeric as linear
from fastcar_compile.codegen.tvm.converters import numeric as norm
from fastcar_compile.codegen.tvm.converters import state as attention
from fastcar_compile.codegen.tvm.converters import state as cache
from fastcar_compile.codegen.tvm.converters import state as gate
from fastcar_compile.codegen.tvm.converters import state as offload
from fastcar_compile.codegen.tvm.converters.numeric import CONVERTERS, Converter

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
