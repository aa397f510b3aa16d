"""Converters: each makes of one call of one operator the Relax calls of its kernels. Importing them registers them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tvm import relax
from tvm.tirx import PrimFunc

import fastcar_compile.codegen.tvm.fusion  # noqa: F401  (registers the fused operators, which have converters too)
from fastcar_compile.codegen.tvm.importer import CONVERTERS, Operand, OperatorCall, Value, converts
from fastcar_compile.codegen.tvm.kernels import cache, norm, vectors
from fastcar_compile.codegen.tvm.kernels.cache import MAX_ROWS
from fastcar_compile.codegen.tvm.kernels.linear.activations import quantize_rows
from fastcar_compile.codegen.tvm.kernels.registry import Kernel
from fastcar_compile.codegen.tvm.relax_api import untyped
from fastcar_compile.codegen.tvm.state_converters import positions
from fastcar_compile.ir.ops.linear import factor_table

aten, fastcar = torch.ops.aten, torch.ops.fastcar


# PyTorch's own operators where TVM's converter is missing, unsafe or slow.


@converts(aten.all.default)
def all_of(call: OperatorCall, number: str = "int8") -> Value:
    """Emit `all` of a bool vector as the minimum of numbers: TVM has no converter for it. One element is a view."""
    x = call.tensor("self")
    # At batch 1 the one decision is its own conjunction.
    if math.prod(x.shape) == 1:
        return call.reshape(x.value, ())
    smallest = relax.op.min(relax.op.astype(x.value, number))
    return call.emit(relax.op.astype(call.emit(smallest), "bool"))


@converts(aten.transpose.int)
def _transpose(call: OperatorCall) -> Value:
    """Emit a view where no element moves: at most one axis from the first to the last is longer than 1."""
    x = call.tensor("self")
    first, last = sorted(call[name] % len(x.shape) for name in ("dim0", "dim1"))
    if sum(n > 1 for n in x.shape[first : last + 1]) <= 1:
        return call.reshape(x.value, call.shape)
    axes = list(range(len(x.shape)))
    axes[first], axes[last] = last, first
    return call.emit(relax.op.permute_dims(x.value, axes))


@converts(aten.embedding.default)
def _embedding(call: OperatorCall) -> Value:
    """Emit a clipping lookup: TVM's own reads out of bounds for an id outside the vocabulary."""
    return call.emit(relax.op.take(*call.values("weight", "indices"), axis=0, mode="clip"))


@converts(aten.full.default)
def _full(call: OperatorCall) -> Value:
    """Emit a constant, spread over the shape, for infinities: TVM's own fails for them."""
    value = float(call["fill_value"])
    if not math.isinf(value):
        return call.stock()
    return call.emit(untyped.op.broadcast_to(relax.const(value, call.dtype), call.shape))


@converts(aten.masked_fill.Scalar)
def _masked_fill(call: OperatorCall) -> Value:
    """Emit a choice for infinities, for the same reason."""
    value = float(call["value"])
    if not math.isinf(value):
        return call.stock()
    filling = relax.const(value, call.dtype)
    return call.emit(relax.op.where(call.tensor("mask").value, filling, call.tensor("self").value))


@converts(aten.clamp.default)
def _clamp(call: OperatorCall) -> Value:
    """Emit maximum and minimum for whole numbers: TVM's own fills a bound that is left out with an infinity."""
    if not call.dtype.startswith("int"):
        return call.stock()
    value = call.tensor("self").value
    for name, bound in (("min", relax.op.maximum), ("max", relax.op.minimum)):
        if call.has(name):
            value = call.emit(bound(value, relax.const(call[name], call.dtype)))
    return value


@converts(aten.select.int)
def select(call: OperatorCall, number: str = "int64") -> Value:
    """Emit a clipping lookup, as for the embedding: TVM's own does not check the index."""
    index = relax.const(call["index"], number)
    return call.emit(relax.op.take(call.tensor("self").value, index, axis=call["dim"], mode="clip"))


@converts(aten.index.Tensor)
def _index(call: OperatorCall) -> Value:
    """Emit a clipping lookup for one index of integers, such as rows by position; else TVM's own."""
    axes = [axis for axis, index in enumerate(call["indices"]) if index is not None]
    index = call.operand(call["indices"][axes[0]])
    if len(axes) > 1 or index.dtype not in ("int64", "int32"):  # a GPU has no int64
        return call.stock()
    return call.emit(relax.op.take(call.tensor("self").value, index.value, axis=axes[0], mode="clip"))


@converts(aten.cat.default)
def _cat(call: OperatorCall) -> Value:
    """Emit a tree of joins for many vectors, such as the decisions of all layers; else TVM's own."""
    parts = call.tensors("tensors")
    if len(parts) <= MAX_ROWS or len(call.shape) != 1 or any(part.dtype != call.dtype for part in parts):
        return call.stock()
    # A kernel takes at most MAX_ROWS vectors, so joins of joins are made until one vector is left.
    rows = [(part.value, part.shape[0]) for part in parts]
    while len(rows) > 1:
        rows = [_joined(call, rows[i : i + MAX_ROWS]) for i in range(0, len(rows), MAX_ROWS)]
    return rows[0][0]


def _joined(call: OperatorCall, rows: list[tuple[relax.Expr, int]]) -> tuple[relax.Expr, int]:
    sizes = tuple(size for _, size in rows)
    kernel = cache.concat_rows(sizes, call.dtype)
    return call.kernel(kernel, [row for row, _ in rows], (sum(sizes),)), sum(sizes)


@converts(aten.split.Tensor)
def _split(call: OperatorCall) -> Value:
    """Emit a tree of splits for a vector of many equal parts, such as the thresholds; else TVM's own."""
    parts = [tuple(int(d) for d in part.shape) for part in call.results]
    if len(parts) <= MAX_ROWS or any(shape != parts[0] or len(shape) != 1 for shape in parts):
        return call.stock()
    whole = call.tensor("self")
    return tuple(_parted(call, whole.value, len(parts), parts[0][0], whole.dtype))


def _parted(call: OperatorCall, whole: relax.Expr, count: int, size: int, dtype: str) -> list[relax.Expr]:
    """Return `count` parts of `size` elements. Each kernel makes at most MAX_ROWS parts, which are split in turn."""
    if count == 1:
        return [whole]
    inner = next((n for n in range(min(MAX_ROWS, count - 1), 0, -1) if count % n == 0), 1) if count > MAX_ROWS else 1
    outer = count // inner
    rows = call.kernels(cache.split_rows(outer, inner * size, dtype), [whole], [((inner * size,), dtype)] * outer)
    return [part for row in rows for part in _parted(call, row, inner, size, dtype)]


# Activations in float32 as plain arithmetic, which LLVM vectorises. TVM's own call libm for each element.


def _elementwise(function: Callable[[Any], Any], call: OperatorCall) -> Value:
    """Emit a kernel that TVM fuses with its neighbours; other types than float32 are left to TVM's converter."""
    return call.elementwise(function) if call.dtype == "float32" else call.stock()


@converts(aten.gelu.default)
def _gelu(call: OperatorCall) -> Value:
    return _elementwise(vectors.gelu_tanh if call["approximate"] == "tanh" else vectors.gelu, call)


def _float_linear(rows: str, call: OperatorCall) -> Value:
    x, weight = call.tensor(rows), call.tensor("weight")
    m, k = x.rows
    n = weight.shape[0]
    # float32 and bfloat16 weights differ in the kernel only.
    kernel = call.dispatch(f"linear_{weight.dtype}", m, n, k)
    y = call.kernel(kernel, [call.reshape(x.value, (m, k)), weight.value], (m, n))
    return _biased(call, y)


@converts(fastcar.integer_linear.default)
def _integer_linear(call: OperatorCall) -> Value:
    rows, weight = call.tensor("rows"), call.tensor("qweight")
    (m, k), n = rows.rows, weight.shape[0]
    kernel = call.dispatch("linear_w8a8" if weight.dtype == "int8" else "linear_w4a8", m, n, k)
    quantized = [call.reshape(rows.value, (m, k)), call.reshape(call.tensor("scales").value, (m,))]
    return _biased(call, call.kernel(kernel, [*quantized, weight.value, call.tensor("wscale").value], (m, n)))


def _biased(call: OperatorCall, y: relax.Expr) -> Value:
    """Emit the bias as an operator of its own, so that the product before it keeps its own rounding."""
    bias = call.optional("bias")
    if bias is not None:
        y = call.emit(relax.op.add(y, bias.value))
    return call.reshape(y, call.shape)


@converts(fastcar.quantize_rows.default)
def _quantize_rows(call: OperatorCall) -> Value:
    x = call.tensor("x")
    return quantized(call, quantize_rows(*x.rows), [call.reshape(x.value, x.rows)], x)


@converts(fastcar.gated_quantize.default)
def _gated_quantize(call: OperatorCall) -> Value:
    gate, up, activation = call.tensor("gate"), call.tensor("up"), call["activation"]
    table = call.constant(factor_table(activation).numpy())
    values = [*(call.reshape(x.value, x.rows) for x in (gate, up)), table]
    return quantized(call, call.dispatch("activate_quantize", *gate.rows, activation), values, gate)


@converts(fastcar.draft_features_quantize.default)
def _draft_features_quantize(call: OperatorCall) -> Value:
    (rows, neurons), rank, activation = call.tensor("gate").rows, call.tensor("inner").rows[1], call["activation"]
    kernel = call.dispatch("draft_features_quantize", rows // 2, neurons, rank, activation)
    arguments = [*call.values("gate", "up", "inner", "gain"), call.constant(factor_table(activation).numpy())]
    types = [((rows // 2, neurons + rank), "int8"), ((rows // 2,), "float32")]
    return tuple(call.kernels(kernel, arguments, types))


def quantized(call: OperatorCall, kernel: PrimFunc, args: list[relax.Expr], x: Operand) -> Value:
    """Emit a kernel whose results are int8 rows [M, K] and float32 scales [M], as rows and scales of x [..., K]."""
    # The kernel sees a matrix [M, K]; rows and scales get the leading axes of x back.
    m, k = x.rows
    rows, scales = call.kernels(kernel, args, [((m, k), "int8"), ((m,), "float32")])
    return call.reshape(rows, x.shape), call.reshape(scales, x.shape[:-1])


@converts(fastcar.activation_factor.default)
def _activation_factor(call: OperatorCall) -> Value:
    x, activation = call.tensor("x"), call["activation"]
    size = math.prod(x.shape)
    args = [call.reshape(x.value, (size,)), call.constant(factor_table(activation).numpy())]
    return call.reshape(call.kernel(call.dispatch("activation_factor", size, activation), args, (size,)), x.shape)


def _rows_and_weight(call: OperatorCall) -> list[relax.Expr]:
    x = call.tensor("x")
    return [call.reshape(x.value, x.rows), call.tensor("weight").value]


def _rows_weight_and_bias(call: OperatorCall) -> list[relax.Expr]:
    """Return rows, weight and bias; a missing weight is ones, a missing bias zeros."""
    x, weight, bias = call.tensor("x"), call.optional("weight"), call.optional("bias")
    ones, zeros = np.ones(x.shape[-1], np.float32), np.zeros(x.shape[-1], np.float32)
    scale = call.constant(ones) if weight is None else weight.value
    return [call.reshape(x.value, x.rows), scale, call.constant(zeros) if bias is None else bias.value]


def _norm(kernel: Kernel, arguments: Callable[[OperatorCall], list[relax.Expr]], call: OperatorCall) -> Value:
    x = call.tensor("x")
    return call.reshape(call.kernel(kernel(*x.rows, float(call["epsilon"])), arguments(call), x.rows), x.shape)


def _norm_quantize(kernel: Kernel, arguments: Callable[[OperatorCall], list[relax.Expr]], call: OperatorCall) -> Value:
    x = call.tensor("x")
    return quantized(call, kernel(*x.rows, float(call["epsilon"])), arguments(call), x)


CONVERTERS |= {
    aten.sigmoid.default: partial(_elementwise, vectors.sigmoid),
    aten.tanh.default: partial(_elementwise, vectors.tanh),
    aten.silu.default: partial(_elementwise, vectors.silu),
    aten.linear.default: partial(_float_linear, "input"),
    fastcar.linear_half.default: partial(_float_linear, "x"),
    fastcar.rms_norm.default: partial(_norm, norm.rms_norm, _rows_and_weight),
    fastcar.rms_norm_quantize.default: partial(_norm_quantize, norm.rms_norm_quantize, _rows_and_weight),
    fastcar.exact_norm.default: partial(_norm, norm.exact_norm, _rows_and_weight),
    fastcar.exact_norm_quantize.default: partial(_norm_quantize, norm.exact_norm_quantize, _rows_and_weight),
    fastcar.exact_layer_norm.default: partial(_norm, norm.exact_layer_norm, _rows_weight_and_bias),
    fastcar.exact_layer_norm_quantize.default: partial(
        _norm_quantize, norm.exact_layer_norm_quantize, _rows_weight_and_bias
    ),
    fastcar.layer_norm.default: partial(_norm, norm.layer_norm, _rows_weight_and_bias),
    fastcar.layer_norm_quantize.default: partial(_norm_quantize, norm.layer_norm_quantize, _rows_weight_and_bias),
}


@converts(fastcar.rotary.default)
def _rotary(call: OperatorCall) -> Value:
    x, cos, sin = (call.tensor(name) for name in ("x", "cos", "sin"))
    batch, heads, rows, width = x.shape
    # Cosines and sines have one batch row for all, or one for each.
    kernel = norm.rotary((batch, heads, rows, width), cos.shape[0])
    return call.kernel(kernel, [x.value, *(call.reshape(t.value, t.shape) for t in (cos, sin))])


@converts(fastcar.exact_rotary.default)
def _exact_rotary(call: OperatorCall) -> Value:
    batch, heads, rows, width = call.tensor("x").shape
    kernel = norm.exact_rotary((batch, heads, rows, width), call.tensor("table").rows, *positions(call))
    return call.kernel(kernel, call.values("x", "table", "position"))
