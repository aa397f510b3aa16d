"""ONNX definitions of the `fastcar::` operators, for `torch.onnx.export(custom_translation_table=…)`.

Each function mirrors the eager definition of the same name in fastcar_compile/ops; B batch rows, S cache capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnxscript import opset18 as op

from fastcar_compile.codegen.onnx.cache import read, stored
from fastcar_compile.codegen.onnx.gate_scores import SCORES
from fastcar_compile.codegen.onnx.window import WINDOW
from fastcar_compile.ops import activations, quant
from fastcar_compile.ops.attention import TAS_FRACTION_BITS, TAS_LIMIT, score_factor

ZERO_POINT = 128
"""Of weights and activations. Both are unsigned here: the unsigned-by-unsigned kernels of onnxruntime are exact on
every x86-64, while signed weights saturate at 16 bits where the CPU has no VNNI (its docs, "Quantization", U8S8)."""

Value = Any
"""A traced ONNX value."""


def _ints(*values: int) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(values, np.int64)))


def _int32(value: int) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, np.int32)))


def _uint8(value: int) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, np.uint8)))


def _float(value: float) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, np.float32)))


def _double(value: float) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, np.float64)))


def _shape(value: Value) -> list[int]:
    return [int(d) for d in value.shape]


def cache_write(cache: Value, value: Value, position: Value) -> Value:
    """One row at `position`; the decode step never writes past the end."""
    batch, heads, _, size = _shape(cache)
    index = op.Expand(op.Reshape(position, _ints(1, 1, 1, 1)), _ints(batch, heads, 1, size))
    return op.ScatterElements(cache, index, stored(value, cache), axis=2)


def attention(query: Value, key_cache: Value, value_cache: Value, position: Value, scale: float) -> Value:
    """Softmax attention over the first position + 1 rows of the cache only."""
    batch, heads, _, dim = _shape(query)
    kv_heads = _shape(key_cache)[1]
    end = op.Add(position, _ints(1))
    keys = read(op.Slice(key_cache, _ints(0), end, _ints(2)), key_cache, dim)
    values = read(op.Slice(value_cache, _ints(0), end, _ints(2)), value_cache, dim)
    grouped = op.Reshape(query, _ints(batch, kv_heads, heads // kv_heads, dim))
    logits = op.MatMul(op.Mul(grouped, _float(scale)), op.Transpose(keys, perm=[0, 1, 3, 2]))
    out = op.MatMul(op.Softmax(logits, axis=-1), values)
    return op.Reshape(out, _ints(batch, heads, 1, dim))


def tas(query: Value, key_cache: Value, position: Value, stride: int, scale: float) -> Value:
    """Mean over query heads of scale * <query, key one frame earlier>, summed in integers."""
    batch, heads, _, dim = _shape(query)
    kv_heads = _shape(key_cache)[1]
    earlier = op.Max(op.Sub(position, _ints(stride)), _ints(0))
    key = op.Cast(read(op.Gather(key_cache, earlier, axis=2), key_cache, dim), to=onnx.TensorProto.DOUBLE)
    grouped = op.Cast(op.Reshape(query, _ints(batch, kv_heads, heads // kv_heads, dim)), to=onnx.TensorProto.DOUBLE)
    products = op.Mul(op.Mul(grouped, key), _double(1 << TAS_FRACTION_BITS))
    rounded = op.Clip(op.Round(products), _double(-TAS_LIMIT), _double(TAS_LIMIT))
    finite = op.Less(op.Abs(products), _double(float("inf")))
    whole = op.Cast(op.Where(finite, rounded, _double(-TAS_LIMIT)), to=onnx.TensorProto.INT64)
    total = op.Cast(op.ReduceSum(whole, _ints(1, 2, 3), keepdims=0), to=onnx.TensorProto.FLOAT)
    return op.Mul(total, _float(score_factor(scale, heads)))


def gate(
    score: Value,
    threshold: Value,
    step: Value,
    chain: Value,
    stride: int,
    max_chain: int,
    couple_cfg: bool,
    refresh_every: int = 0,
    at_most: bool = False,
) -> Value:
    """Threshold, first frame, refresh, chain limit and guidance coupling."""
    passes = op.LessOrEqual(score, threshold) if at_most else op.GreaterOrEqual(score, threshold)
    replay = op.And(passes, op.GreaterOrEqual(step, _ints(stride)))
    if refresh_every > 0:
        phase = op.Mod(op.Div(step, _ints(stride)), _ints(refresh_every))
        replay = op.And(replay, op.Greater(phase, _ints(0)))
    if max_chain >= 0:
        replay = op.And(replay, op.Less(slot_read(chain, step), _int32(max_chain)))
    if couple_cfg:
        half = _shape(score)[0] // 2
        both = op.And(op.Slice(replay, _ints(0), _ints(half)), op.Slice(replay, _ints(half), _ints(2 * half)))
        replay = op.Concat(both, both, axis=0)
    return replay


def slot_read(cache: Value, step: Value) -> Value:
    """Row step mod F."""
    slot = op.Mod(step, _ints(_shape(cache)[0]))
    return op.Squeeze(op.Gather(cache, slot, axis=0), _ints(0))


def slot_write(cache: Value, value: Value, step: Value) -> Value:
    """The cache with row step mod F replaced."""
    slot = op.Mod(step, _ints(_shape(cache)[0]))
    return op.ScatterND(cache, op.Reshape(slot, _ints(1, 1)), op.Unsqueeze(value, _ints(0)))


def _quantized_rows(x: Value) -> tuple[Value, Value, Value]:
    """uint8 rows with zero point 128, their scale [..., 1] in float32, and the zero point."""
    amax = op.Max(op.ReduceMax(op.Abs(x), _ints(-1), keepdims=1), _float(1e-30))
    rounded = op.Round(op.Mul(x, op.Div(_float(127.0), amax)))
    clipped = op.Clip(rounded, _float(-127.0), _float(127.0))
    quantized = op.Cast(op.Add(clipped, _float(ZERO_POINT)), to=onnx.TensorProto.UINT8)
    return quantized, op.Mul(amax, _float(quant._INV_127)), _uint8(ZERO_POINT)


def linear_bf16(x: Value, weight: Value, bias: Value | None) -> Value:
    """The weights are cast to float32, which is exact."""
    y = op.MatMul(x, op.Transpose(op.Cast(weight, to=onnx.TensorProto.FLOAT), perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


def linear_w8a8(x: Value, qweight: Value, wscale: Value, bias: Value | None) -> Value:
    """Dynamic int8 rows times int8 weights; `qweight` is uint8 [N, K] with zero point 128 (see `ZERO_POINT`)."""
    quantized, row_scale, zero = _quantized_rows(x)
    acc = op.MatMulInteger(quantized, op.Transpose(qweight, perm=[1, 0]), zero, zero)
    y = op.Mul(op.Cast(acc, to=onnx.TensorProto.FLOAT), op.Mul(row_scale, wscale))
    return y if bias is None else op.Add(y, bias)


def linear_w4a8(x: Value, qweight: Value, wscale: Value, bias: Value | None) -> Value:
    """Dynamic int8 rows times int4 groups; `qweight` is packed uint8 [N, 64 * G], `wscale` float16 [N, G].

    CumSum adds the groups in ascending order, one rounding each, as the eager definition does.
    """
    (channels, packed), (*rows, inputs) = _shape(qweight), _shape(x)
    groups, count = packed * 2 // quant.GROUP, int(np.prod(rows))
    quantized, row_scale, zero = _quantized_rows(op.Reshape(x, _ints(count, inputs)))
    spare = op.Constant(value=onnx.numpy_helper.from_array(np.array([0, 0, 0, groups * quant.GROUP - inputs])))
    left = op.Reshape(op.Pad(quantized, spare, zero), _ints(count, groups, quant.GROUP))
    halves = op.Reshape(qweight, _ints(channels, groups, quant.GROUP // 2))
    nibbles = op.Concat(op.BitwiseAnd(halves, _uint8(15)), op.BitShift(halves, _uint8(4), direction="RIGHT"), axis=2)
    # Nibble + 8, mod 16, is the weight + 8: with 120 more its zero point is 128 too.
    right = op.Add(op.BitwiseAnd(op.Add(nibbles, _uint8(8)), _uint8(15)), _uint8(ZERO_POINT - 8))
    acc = op.MatMulInteger(op.Transpose(left, perm=[1, 0, 2]), op.Transpose(right, perm=[1, 2, 0]), zero, zero)
    scales = op.Unsqueeze(op.Transpose(op.Cast(wscale, to=onnx.TensorProto.FLOAT), perm=[1, 0]), _ints(1))
    sums = op.CumSum(op.Mul(op.Cast(acc, to=onnx.TensorProto.FLOAT), scales), _ints(0))
    total = op.Squeeze(op.Slice(sums, _ints(groups - 1), _ints(groups), _ints(0)), _ints(0))
    y = op.Reshape(op.Mul(total, row_scale), _ints(*rows, channels))
    return y if bias is None else op.Add(y, bias)


def activation_factor(x: Value, activation: str) -> Value:
    """Table factor in integers; every operand is non-negative, so an integer division is a shift."""
    table = op.Constant(value=onnx.numpy_helper.from_array(activations.factor_table(activation).numpy()))
    kind = activations.FACTORS[activation]
    rounded = op.Round(op.Mul(op.Clip(x, _float(-kind.limit), _float(kind.limit)), _float(kind.input_scale)))
    fixed = op.Add(op.Cast(rounded, to=onnx.TensorProto.INT32), _int32(activations.INPUT_STEPS))
    index = op.Min(op.Div(fixed, _int32(64)), _int32(activations.KNOTS - 2))
    fraction = op.Sub(fixed, op.Mul(index, _int32(64)))
    low, high = op.Gather(table, index), op.Gather(table, op.Add(index, _int32(1)))
    blend = op.Add(op.Mul(low, op.Sub(_int32(64), fraction)), op.Mul(high, fraction))
    shifted = op.Div(op.Add(blend, _int32(32)), _int32(64))
    return op.Mul(op.Cast(shifted, to=onnx.TensorProto.FLOAT), _float(2.0**-activations.FRACTION_BITS))


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operator overload -> its ONNX definition."""
    linears = (linear_bf16, linear_w8a8, linear_w4a8)
    state = (cache_write, attention, tas, gate, slot_read, slot_write)
    every = (*state, *linears, activation_factor, *WINDOW, *SCORES)
    return {getattr(torch.ops.fastcar, f.__name__).default: f for f in every}
