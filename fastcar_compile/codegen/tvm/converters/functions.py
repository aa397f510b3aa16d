"""Activations in float32 as plain arithmetic, which LLVM vectorises. TVM's own call libm for each element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tvm import relax

from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts
from fastcar_compile.codegen.tvm.kernels.simd.functions import gelu, gelu_tanh, sigmoid, silu, tanh

aten = torch.ops.aten


@converts(aten.sigmoid.default)
def _sigmoid(call: Call) -> Value:
    return _elementwise(call, sigmoid)


@converts(aten.tanh.default)
def _tanh(call: Call) -> Value:
    return _elementwise(call, tanh)


@converts(aten.silu.default)
def _silu(call: Call) -> Value:
    return _elementwise(call, silu)


@converts(aten.gelu.default)
def _gelu(call: Call) -> Value:
    return _elementwise(call, gelu_tanh if call.text("approximate") == "tanh" else gelu)


def _elementwise(call: Call, function: Callable[[Any], Any]) -> relax.Expr:
    """Emit a kernel that TVM fuses with its neighbours; other types than float32 are left to TVM's converter."""
    if call.dtype != "float32":
        return call.stock()
    return call.elementwise(function.__name__, function, "self")
