"""Activations in float32 as plain arithmetic, which LLVM vectorises. TVM's own call libm for each element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tvm import relax
from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts
from fastcar_compile.codegen.tvm.kernels.simd.functions import erf, sigmoid, tanh

aten = torch.ops.aten


@converts(aten.sigmoid.default)
def _sigmoid(call: Call) -> Value:
    return _elementwise(call, "sigmoid", sigmoid)


@converts(aten.tanh.default)
def _tanh(call: Call) -> Value:
    return _elementwise(call, "tanh", tanh)


@converts(aten.silu.default)
def _silu(call: Call) -> Value:
    return _elementwise(call, "silu", lambda x: x * sigmoid(x))


@converts(aten.gelu.default)
def _gelu(call: Call) -> Value:
    """Emit x * (1 + erf(x / sqrt 2)) / 2, or its approximation by tanh (Hendrycks and Gimpel, arXiv 1606.08415)."""
    if call.text("approximate") == "tanh":
        root = T.float32(math.sqrt(2 / math.pi))
        return _elementwise(call, "gelu_tanh", lambda x: _half(x, tanh((x * x * x * T.float32(0.044715) + x) * root)))
    return _elementwise(call, "gelu", lambda x: _half(x, erf(x * T.float32(math.sqrt(0.5)))))


def _half(x: Any, inner: Any) -> Any:
    return x * T.float32(0.5) * (inner + T.float32(1))


def _elementwise(call: Call, name: str, function: Callable[[Any], Any]) -> relax.Expr:
    """Emit a kernel that TVM fuses with its neighbours; other types than float32 are left to TVM's converter."""
    if call.dtype != "float32":
        return call.stock()
    return call.elementwise(name, function, "self")
