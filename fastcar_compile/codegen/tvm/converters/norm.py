"""Norms, alone and with the quantisation of their rows, and the rotary embedding."""

from __future__ import annotations

import numpy as np
import torch
from tvm import relax

from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.linear import quantized
from fastcar_compile.codegen.tvm.converters.registry import converts
from fastcar_compile.codegen.tvm.kernels.norm.exact import exact_norm, exact_norm_quantize, exact_rotary
from fastcar_compile.codegen.tvm.kernels.norm.norm import layer_norm, layer_norm_quantize, rms_norm, rms_norm_quantize
from fastcar_compile.codegen.tvm.kernels.norm.rotary import rotary

fastcar = torch.ops.fastcar


@converts(fastcar.rms_norm.default)
def _rms_norm(call: Call) -> Value:
    x = call.tensor("x")
    y = call.kernel(rms_norm(*x.rows, call.number("epsilon")), _rms_arguments(call), x.rows)
    return call.reshape(y, x.shape)


@converts(fastcar.rms_norm_quantize.default)
def _rms_norm_quantize(call: Call) -> Value:
    x = call.tensor("x")
    return quantized(call, rms_norm_quantize(*x.rows, call.number("epsilon")), _rms_arguments(call), x)


@converts(fastcar.exact_norm.default)
def _exact_norm(call: Call) -> Value:
    x = call.tensor("x")
    y = call.kernel(exact_norm(*x.rows, call.number("epsilon")), _rms_arguments(call), x.rows)
    return call.reshape(y, x.shape)


@converts(fastcar.exact_norm_quantize.default)
def _exact_norm_quantize(call: Call) -> Value:
    x = call.tensor("x")
    return quantized(call, exact_norm_quantize(*x.rows, call.number("epsilon")), _rms_arguments(call), x)


def _rms_arguments(call: Call) -> list[relax.Expr]:
    x = call.tensor("x")
    return [call.reshape(x.value, x.rows), call.tensor("weight").value]


@converts(fastcar.layer_norm.default)
def _layer_norm(call: Call) -> Value:
    x = call.tensor("x")
    y = call.kernel(layer_norm(*x.rows, call.number("epsilon")), _layer_arguments(call), x.rows)
    return call.reshape(y, x.shape)


@converts(fastcar.layer_norm_quantize.default)
def _layer_norm_quantize(call: Call) -> Value:
    x = call.tensor("x")
    return quantized(call, layer_norm_quantize(*x.rows, call.number("epsilon")), _layer_arguments(call), x)


def _layer_arguments(call: Call) -> list[relax.Expr]:
    """Return rows, weight and bias; a missing weight is ones, a missing bias zeros."""
    x, weight, bias = call.tensor("x"), call.optional("weight"), call.optional("bias")
    ones, zeros = np.ones(x.shape[-1], np.float32), np.zeros(x.shape[-1], np.float32)
    scale = call.constant(ones) if weight is None else weight.value
    return [call.reshape(x.value, x.rows), scale, call.constant(zeros) if bias is None else bias.value]


@converts(fastcar.rotary.default)
def _rotary(call: Call) -> Value:
    x, cos, sin = (call.tensor(name) for name in ("x", "cos", "sin"))
    batch, heads, rows, width = x.shape
    # Cosines and sines have one batch row for all, or one for each.
    kernel = rotary((batch, heads, rows, width), cos.shape[0])
    return call.kernel(kernel, [x.value, *(call.reshape(t.value, t.shape) for t in (cos, sin))])


@converts(fastcar.exact_rotary.default)
def _exact_rotary(call: Call) -> Value:
    batch, heads, rows, width = call.tensor("x").shape
    size, angles = call.tensor("table").rows
    kernel = exact_rotary((batch, heads, rows, width), (size, angles))
    return call.kernel(kernel, call.values("x", "table", "position"))
