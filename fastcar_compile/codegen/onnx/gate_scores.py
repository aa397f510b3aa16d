"""ONNX definitions of the gates' scores beside `tas`; each mirrors the eager one of the same name in ops/gates.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnxscript import opset18 as op

from fastcar_compile.codegen.onnx.cache import read
from fastcar_compile.ops.gates import HASH_BITS, HASH_FACTORS, HASH_PRIME, HASH_ROUNDS, TINY

Value = Any
"""A traced ONNX value."""


def _ints(*values: int) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(values, np.int64)))


def _floats(values: float | Sequence[float]) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(values, np.float32)))


def _earlier_key(query: Value, key_cache: Value, position: Value, stride: int) -> Value:
    """Key one frame earlier for every group of query heads, [B, Hkv, 1, D], and the query grouped alike."""
    batch, heads, _, dim = (int(d) for d in query.shape)
    kv_heads = int(key_cache.shape[1])
    earlier = op.Max(op.Sub(position, _ints(stride)), _ints(0))
    key = read(op.Gather(key_cache, earlier, axis=2), key_cache, dim)
    return key, op.Reshape(query, _ints(batch, kv_heads, heads // kv_heads, dim))


def _sum_of_squares(x: Value) -> Value:
    return op.ReduceSum(op.Mul(x, x), _ints(-1), keepdims=0)


def tas_heads(
    query: Value,
    key_cache: Value,
    position: Value,
    stride: int,
    scale: float,
    heads: Sequence[int],
    weights: Sequence[float],
) -> Value:
    """Weighted sum over query heads; a head that is not chosen has weight 0."""
    batch, total = (int(d) for d in query.shape[:2])
    factors = np.zeros(total, np.float32)
    factors[list(heads)] = weights
    key, grouped = _earlier_key(query, key_cache, position, stride)
    products = op.ReduceSum(op.Mul(grouped, key), _ints(-1), keepdims=0)
    weighted = op.Mul(op.Reshape(products, _ints(batch, total)), _floats(factors.tolist()))
    return op.Mul(op.ReduceSum(weighted, _ints(-1), keepdims=0), _floats(scale))


def input_delta(x: Value, cached: Value) -> Value:
    """||x - cached|| / ||x||."""
    change = op.ReduceSum(op.Abs(op.Sub(x, cached)), _ints(-1), keepdims=0)
    return op.Div(change, op.Max(op.ReduceSum(op.Abs(x), _ints(-1), keepdims=0), _floats(TINY)))


def output_bound(
    x: Value, cached: Value, query: Value, key_cache: Value, position: Value, stride: int, weight: float
) -> Value:
    """Input change plus weight * sqrt(1 - cosine of query and earlier key)."""
    key, grouped = _earlier_key(query, key_cache, position, stride)
    dots = op.ReduceSum(op.Mul(grouped, key), _ints(-1), keepdims=0)
    lengths = op.Sqrt(op.Max(op.Mul(_sum_of_squares(grouped), _sum_of_squares(key)), _floats(TINY)))
    cosine = op.ReduceMean(op.Div(dots, lengths), _ints(1, 2), keepdims=0)
    distance = op.Sqrt(op.Max(op.Sub(_floats(1.0), cosine), _floats(0.0)))
    return op.Add(input_delta(x, cached), op.Mul(_floats(weight), distance))


def learned_score(x: Value, cached: Value, w1: Value, b1: Value, w2: Value, b2: Value) -> Value:
    """w2 . relu(w1 @ [x ; |x - cached|] + b1) + b2."""
    features = op.Concat(x, op.Abs(op.Sub(x, cached)), axis=1)
    first = op.Transpose(op.Cast(w1, to=onnx.TensorProto.FLOAT), perm=[1, 0])
    hidden = op.Relu(op.Add(op.MatMul(features, first), b1))
    return op.Add(op.MatMul(hidden, w2), b2)


def constant_score(step: Value, rows: int, value: float) -> Value:
    """The value for every row."""
    return op.Expand(_floats(value), _ints(int(step.shape[0]) * rows))


def random_score(step: Value, rows: int, layer: int) -> Value:
    """The hash in int64; every operand is non-negative, so integer division and Mod are exact."""
    by_step, by_row, by_layer = HASH_FACTORS
    prime = _ints(HASH_PRIME)
    offsets = _ints(*((row + 1) * by_row + (layer + 1) * by_layer for row in range(rows)))
    x = op.Mod(op.Add(op.Mul(op.Add(step, _ints(1)), _ints(by_step)), offsets), prime)
    for constant in HASH_ROUNDS:
        square = op.Mod(op.Mul(x, x), prime)
        fourth = op.Mod(op.Mul(square, square), prime)
        x = op.Mod(op.Add(op.Mul(fourth, x), _ints(constant)), prime)
    number = op.Add(op.Div(x, _ints(2 ** (31 - HASH_BITS))), _ints(1))
    return op.Mul(op.Cast(number, to=onnx.TensorProto.FLOAT), _floats(2.0**-HASH_BITS))


SCORES = (tas_heads, input_delta, output_bound, learned_score, constant_score, random_score)
