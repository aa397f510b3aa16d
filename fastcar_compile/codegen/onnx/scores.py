"""The gates' scores beside `tas`; each mirrors the eager definition of the same name in ops/gates.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from fastcar_compile.codegen.onnx.attention import earlier_key
from fastcar_compile.codegen.onnx.values import Value, cast, floats, ints, op, shape
from fastcar_compile.ops.gates import HASH_BITS, HASH_FACTORS, HASH_PRIME, HASH_ROUNDS, TINY


def _sum_of_squares(x: Value) -> Value:
    return op.ReduceSum(op.Mul(x, x), ints(-1), keepdims=0)


def tas_heads(
    query: Value,
    key_cache: Value,
    position: Value,
    stride: int,
    scale: float,
    heads: Sequence[int],
    weights: Sequence[float],
) -> Value:
    """Return a weighted sum over query heads. A head that is not chosen has weight 0."""
    batch, total = shape(query)[:2]
    factors = np.zeros(total, np.float32)
    factors[list(heads)] = weights
    key, grouped = earlier_key(query, key_cache, position, stride)
    products = op.ReduceSum(op.Mul(grouped, key), ints(-1), keepdims=0)
    weighted = op.Mul(op.Reshape(products, ints(batch, total)), floats(factors.tolist()))
    return op.Mul(op.ReduceSum(weighted, ints(-1), keepdims=0), floats(scale))


def input_delta(x: Value, cached: Value) -> Value:
    """Return ||x - cached|| / ||x||."""
    change = op.ReduceSum(op.Abs(op.Sub(x, cached)), ints(-1), keepdims=0)
    return op.Div(change, op.Max(op.ReduceSum(op.Abs(x), ints(-1), keepdims=0), floats(TINY)))


def output_bound(
    x: Value, cached: Value, query: Value, key_cache: Value, position: Value, stride: int, weight: float
) -> Value:
    """Return the input change plus weight * sqrt(1 - cosine of query and earlier key)."""
    key, grouped = earlier_key(query, key_cache, position, stride)
    dots = op.ReduceSum(op.Mul(grouped, key), ints(-1), keepdims=0)
    lengths = op.Sqrt(op.Max(op.Mul(_sum_of_squares(grouped), _sum_of_squares(key)), floats(TINY)))
    cosine = op.ReduceMean(op.Div(dots, lengths), ints(1, 2), keepdims=0)
    distance = op.Sqrt(op.Max(op.Sub(floats(1.0), cosine), floats(0.0)))
    return op.Add(input_delta(x, cached), op.Mul(floats(weight), distance))


def learned_score(x: Value, cached: Value, w1: Value, b1: Value, w2: Value, b2: Value) -> Value:
    """Return w2 . relu(w1 @ [x ; |x - cached|] + b1) + b2."""
    features = op.Concat(x, op.Abs(op.Sub(x, cached)), axis=1)
    first = op.Transpose(cast(w1, TensorProto.FLOAT), perm=[1, 0])
    hidden = op.Relu(op.Add(op.MatMul(features, first), b1))
    return op.Add(op.MatMul(hidden, w2), b2)


def constant_score(step: Value, rows: int, value: float) -> Value:
    """Return the value for every row."""
    return op.Expand(floats(value), ints(shape(step)[0] * rows))


def random_score(step: Value, rows: int, layer: int) -> Value:
    """Return the hash, made in int64. Every operand is non-negative, so integer division and Mod are exact."""
    by_step, by_row, by_layer = HASH_FACTORS
    prime = ints(HASH_PRIME)
    offsets = ints(*((row + 1) * by_row + (layer + 1) * by_layer for row in range(rows)))
    x = op.Mod(op.Add(op.Mul(op.Add(step, ints(1)), ints(by_step)), offsets), prime)
    for offset in HASH_ROUNDS:
        square = op.Mod(op.Mul(x, x), prime)
        fourth = op.Mod(op.Mul(square, square), prime)
        x = op.Mod(op.Add(op.Mul(fourth, x), ints(offset)), prime)
    number = op.Add(op.Div(x, ints(2 ** (31 - HASH_BITS))), ints(1))
    return op.Mul(cast(number, TensorProto.FLOAT), floats(2.0**-HASH_BITS))
