"""The gates' scores beside `tas`; each mirrors the eager definition of the same name in ops/gates.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from fastcar_compile.codegen.onnx.attention import earlier_key, fixed_sum
from fastcar_compile.codegen.onnx.values import Value, cast, constant, floats, ints, op, shape
from fastcar_compile.drs.score import (
    COSINE_BITS,
    HASH_BITS,
    HASH_FACTORS,
    HASH_PRIME,
    HASH_ROUNDS,
    TAS_FRACTION_BITS,
    TAS_LIMIT,
    distance_factor,
    score_factor,
)
from fastcar_compile.drs.scores import LEAST_EXPONENT, SCALE_FIELD

_FIELDS = np.arange(LEAST_EXPONENT, 255)
"""Exponent fields of a row of finite features."""


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
    total = shape(query)[1]
    factors = np.zeros((total, 1, 1), np.float32)
    factors[list(heads), 0, 0] = weights
    weighted = op.Mul(query, constant(factors))
    key = earlier_key(query, key_cache, position, stride)[0]
    grouped = op.Reshape(weighted, ints(*_grouped_shape(query, key_cache)))
    products = op.Mul(cast(grouped, TensorProto.DOUBLE), cast(key, TensorProto.DOUBLE))
    return op.Mul(fixed_sum(products, 1, 2, 3), floats(score_factor(scale, 1)))


def _grouped_shape(query: Value, key_cache: Value) -> tuple[int, int, int, int]:
    batch, heads, _, dim = shape(query)
    kv_heads = shape(key_cache)[1]
    return batch, kv_heads, heads // kv_heads, dim


def input_delta(x: Value, cached: Value) -> Value:
    """Return ||x - cached|| / ||x||, NaN where the change is not finite."""
    change = op.Abs(op.Sub(x, cached))
    score = op.Div(_size(change), op.Max(_size(x), floats(1.0)))
    return op.Where(_finite(change), score, floats(float("nan")))


def _size(values: Value) -> Value:
    """Return the sum of absolute values in units of 2^-24, each rounded and limited, as float32."""
    units = op.Mul(op.Abs(values), floats(float(1 << TAS_FRACTION_BITS)))
    # ONNX leaves a cast of NaN to an integer open. The row's score becomes NaN by its own test.
    known = op.Where(op.IsNaN(units), floats(0.0), units)
    whole = cast(op.Min(op.Round(known), floats(float(TAS_LIMIT))), TensorProto.INT64)
    return cast(op.ReduceSum(whole, ints(-1), keepdims=0), TensorProto.FLOAT)


def _finite(values: Value, *axes: int) -> Value:
    """Return whether all values are finite along the axes, or the last one."""
    # `ReduceMin` takes no bool in this opset.
    finite = cast(op.Less(op.Abs(values), floats(float("inf"))), TensorProto.INT32)
    return cast(op.ReduceMin(finite, ints(*(axes or (-1,))), keepdims=0), TensorProto.BOOL)


def output_bound(
    x: Value, cached: Value, query: Value, key_cache: Value, position: Value, stride: int, weight: float
) -> Value:
    """Return the input change plus weight * sqrt(1 - cosine of query and earlier key)."""
    heads, one = shape(query)[1], 1 << COSINE_BITS
    key, grouped = earlier_key(query, key_cache, position, stride)
    own, other = (cast(v, TensorProto.DOUBLE) for v in (grouped, key))
    dots, squares, others = (fixed_sum(op.Mul(*pair), -1) for pair in ((own, other), (own, own), (other, other)))
    cosines = op.Div(dots, _root(op.Max(op.Mul(squares, others), floats(1.0))))
    near = cast(op.Round(op.Mul(op.Clip(cosines, floats(-1.0), floats(1.0)), floats(float(one)))), TensorProto.INT64)
    apart = op.Sub(ints(heads * one), op.ReduceSum(near, ints(1, 2), keepdims=0))
    distance = _root(op.Mul(cast(apart, TensorProto.FLOAT), floats(distance_factor(heads))))
    score = op.Add(input_delta(x, cached), op.Mul(floats(weight), distance))
    finite = op.And(_finite(grouped, 1, 2, 3), _finite(key, 1, 2, 3))
    return op.Where(finite, score, floats(float("nan")))


def _root(values: Value) -> Value:
    """Return the square root of float32, rounded once. By float64: onnxruntime may approximate that of float32."""
    return cast(op.Sqrt(cast(values, TensorProto.DOUBLE)), TensorProto.FLOAT)


def learned_score(x: Value, cached: Value, w1: Value, b1: Value, w2: Value, b2: Value) -> Value:
    """Return w2 . relu(w1 @ [x ; |x - cached|] + b1) + b2. The sums of the first layer are exact in float64."""
    features = op.Concat(x, op.Abs(op.Sub(x, cached)), axis=1)
    largest = op.ReduceMax(op.Abs(features), ints(-1), keepdims=1)
    # ONNX cannot read the bits of a float32, so the powers of two up to the largest magnitude are counted.
    reached = cast(op.GreaterOrEqual(largest, constant(np.ldexp(1.0, _FIELDS[1:] - 127))), TensorProto.INT64)
    place = op.ReduceSum(reached, ints(-1), keepdims=1)
    scale, inverse = (
        op.Gather(constant(np.ldexp(1.0, sign * (SCALE_FIELD - _FIELDS))), place, axis=0) for sign in (1, -1)
    )
    whole = cast(op.Round(op.Mul(features, scale)), TensorProto.DOUBLE)
    # bfloat16 widens exactly, so the product in float64 is exact, too.
    first = cast(op.Transpose(cast(w1, TensorProto.FLOAT), perm=[1, 0]), TensorProto.DOUBLE)
    sums = cast(op.MatMul(whole, first), TensorProto.FLOAT)
    hidden = op.Relu(op.Add(op.Mul(sums, inverse), b1))
    total = fixed_sum(op.Mul(cast(hidden, TensorProto.DOUBLE), cast(w2, TensorProto.DOUBLE)), -1)
    score = op.Add(op.Mul(total, floats(2.0**-TAS_FRACTION_BITS)), b2)
    finite = op.And(_finite(features), _finite(hidden))
    return op.Where(finite, score, floats(float("nan")))


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
