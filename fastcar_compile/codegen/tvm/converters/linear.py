"""Linears, the quantisation of their rows, and the activations between them."""

from __future__ import annotations

import math

import torch
from tvm import relax
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.call import Call, Operand, Value
from fastcar_compile.codegen.tvm.converters.registry import converts
from fastcar_compile.codegen.tvm.kernels.linear.quantize_rows import quantize_rows
from fastcar_compile.ops.activations import factor_table

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@converts(aten.linear.default)
def _linear(call: Call) -> Value:
    return _float_linear(call, call.tensor("input"))


@converts(fastcar.linear_bf16.default)
def _linear_bf16(call: Call) -> Value:
    return _float_linear(call, call.tensor("x"))


def _float_linear(call: Call, x: Operand) -> Value:
    weight, (m, k) = call.tensor("weight"), x.rows
    n = weight.shape[0]
    # float32 and bfloat16 weights differ in the kernel only.
    kernel = call.dispatch(f"linear_{weight.dtype}", m, n, k)
    y = call.kernel(kernel, [call.reshape(x.value, (m, k)), weight.value], (m, n))
    return _biased(call, y)


@converts(fastcar.integer_linear.default)
def _integer_linear(call: Call) -> Value:
    rows, weight = call.tensor("rows"), call.tensor("qweight")
    (m, k), n = rows.rows, weight.shape[0]
    kernel = call.dispatch("linear_w8a8" if weight.dtype == "int8" else "linear_w4a8", m, n, k)
    quantized = [call.reshape(rows.value, (m, k)), call.reshape(call.tensor("scales").value, (m,))]
    return _biased(call, call.kernel(kernel, [*quantized, weight.value, call.tensor("wscale").value], (m, n)))


def _biased(call: Call, y: relax.Expr) -> Value:
    """Emit the bias as an operator of its own, so that the product before it keeps its own rounding."""
    bias = call.optional("bias")
    if bias is not None:
        y = call.emit(relax.op.add(y, bias.value))
    return call.reshape(y, call.shape)


@converts(fastcar.quantize_rows.default)
def _quantize_rows(call: Call) -> Value:
    x = call.tensor("x")
    return quantized(call, quantize_rows(*x.rows), [call.reshape(x.value, x.rows)], x)


@converts(fastcar.gated_quantize.default)
def _gated_quantize(call: Call) -> Value:
    gate, up, activation = call.tensor("gate"), call.tensor("up"), call.text("activation")
    values = [*(call.reshape(x.value, x.rows) for x in (gate, up)), _table(call, activation)]
    return quantized(call, call.dispatch("activate_quantize", *gate.rows, activation), values, gate)


def quantized(call: Call, kernel: PrimFunc, args: list[relax.Expr], x: Operand) -> Value:
    """Emit a kernel whose results are int8 rows [M, K] and float32 scales [M], as rows and scales of x [..., K]."""
    # The kernel sees a matrix [M, K]; rows and scales get the leading axes of x back.
    m, k = x.rows
    rows, scales = call.kernels(kernel, args, [((m, k), "int8"), ((m,), "float32")])
    return call.reshape(rows, x.shape), call.reshape(scales, x.shape[:-1])


@converts(fastcar.activation_factor.default)
def _activation_factor(call: Call) -> Value:
    x, activation = call.tensor("x"), call.text("activation")
    size = math.prod(x.shape)
    args = [call.reshape(x.value, (size,)), _table(call, activation)]
    return call.reshape(call.kernel(call.dispatch("activation_factor", size, activation), args, (size,)), x.shape)


def _table(call: Call, activation: str) -> relax.Expr:
    return call.constant(factor_table(activation).numpy())
