"""The cache, attention over it, and TAS, for one new row; each mirrors the eager definition of the same name.

B batch rows, S cache capacity.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from onnx import TensorProto

from fastcar_compile.codegen.onnx.linear import (
    Value,
    by_row,
    cast,
    constant,
    dtype_name,
    floats,
    ints,
    op,
    scalar,
    shape,
)
from fastcar_compile.gates import scores
from fastcar_compile.gates.scores import TAS_FRACTION_BITS, TAS_LIMIT, score_factor
from fastcar_compile.ir.ops.operator import BLOCK, FLOAT16_MAX, INT8_MAX, LEAST_EXPONENT, NOT_A_NUMBER

# KV types in ONNX: how a cache stores float32 rows, and how it reads them back, as ir/ops/operator.py defines it.


def stored(value: Value, cache: Value) -> Value:
    """Return what the cache keeps of float32 rows."""
    return KV_TYPES[dtype_name(cache)][0](value)


def loaded(rows: Value, cache: Value, dim: int) -> Value:
    """Return rows of the cache as float32 [..., dim], `dim` a head's dimension."""
    return KV_TYPES[dtype_name(cache)][1](rows, dim)


def _load_float(rows: Value, _dim: int) -> Value:
    return cast(rows, TensorProto.FLOAT)


_EXPONENTS = np.arange(LEAST_EXPONENT, 122)
"""Exponents of the blocks of an int8 cache. The last exponent is that of INT8_MAX."""

_SCALES = np.ldexp(np.float32(1), np.arange(-128, 127)).astype(np.float32)
_SCALES[0] = np.nan
"""By exponent + 128: ONNX cannot make a float32 of its bits. The first one is NOT_A_NUMBER."""


def _store_int8(value: Value) -> Value:
    """Round half to even; a block's exponent counts the exponents that are too small for it, from the least one."""
    *outer, dim = shape(value)
    count = -(-dim // BLOCK)
    limited = op.Clip(value, floats(-INT8_MAX), floats(INT8_MAX))
    # `Pad` takes all begins, then all ends: only the end of the last axis grows.
    spare = ints(*([0] * (2 * len(outer) + 1)), count * BLOCK - dim)
    blocks = op.Reshape(op.Pad(limited, spare), ints(*outer, count, BLOCK))
    # ONNX leaves open what the maximum of a NaN is, so a NaN is found first and then taken out.
    missing = op.IsNaN(blocks)
    unknown = op.Greater(op.ReduceMax(cast(missing, TensorProto.FLOAT), ints(-1)), floats(0.0))
    known = op.Where(missing, floats(0.0), blocks)
    # A mantissa of 127.5 or more would round to 128. ONNX cannot read exponent bits, so the exponents that are too
    # small for the block are counted.
    limits = constant(np.ldexp(127.5, _EXPONENTS[:-1]))
    too_small = op.GreaterOrEqual(op.ReduceMax(op.Abs(known), ints(-1)), limits)
    places = op.ReduceSum(cast(too_small, TensorProto.INT64), ints(-1))
    inverse = op.Gather(constant(np.ldexp(1.0, -_EXPONENTS)), places, axis=0)
    mantissas = op.Where(unknown, floats(0.0), op.Round(op.Mul(known, inverse)))
    flat = op.Reshape(cast(mantissas, TensorProto.INT8), ints(*outer, count * BLOCK))
    counted = op.Where(unknown, ints(NOT_A_NUMBER), op.Add(places, ints(LEAST_EXPONENT)))
    exponents = op.Squeeze(cast(counted, TensorProto.INT8), ints(-1))
    return op.Concat(op.Slice(flat, ints(0), ints(dim), ints(-1)), exponents, axis=-1)


def _load_int8(rows: Value, dim: int) -> Value:
    last, end = ints(-1), ints(dim)
    mantissas = cast(op.Slice(rows, ints(0), end, last), TensorProto.FLOAT)
    # The exponents of a row stand behind its mantissas.
    exponents = op.Slice(rows, end, ints(dim - (-dim // BLOCK)), last)
    scales = op.Gather(constant(_SCALES), op.Add(cast(exponents, TensorProto.INT64), ints(128)), axis=0)
    return op.Mul(mantissas, op.Gather(scales, constant(np.arange(dim) // BLOCK, np.int64), axis=-1))


KV_TYPES: dict[str, tuple[Callable[[Value], Value], Callable[[Value, int], Value]]] = {
    "float32": (lambda value: value, lambda rows, _dim: rows),
    # Cast rounds half to even.
    "float16": (
        lambda value: cast(op.Clip(value, floats(-FLOAT16_MAX), floats(FLOAT16_MAX)), TensorProto.FLOAT16),
        _load_float,
    ),
    "bfloat16": (lambda value: cast(value, TensorProto.BFLOAT16), _load_float),
    "int8": (_store_int8, _load_int8),
}
"""Name of the type in formats.KV_TYPES, which is the dtype of the cache -> two functions: from float32 rows to rows of
the cache, and from these and a head's dimension to float32 rows."""


def cache_write(cache: Value, value: Value, position: Value) -> Value:
    """Return the cache with one row written at `position`. The decode step never writes past the end."""
    return _written(cache, value, position, position)


def _written(cache: Value, value: Value, row: Value, position: Value) -> Value:
    batch, heads, _, size = shape(cache)
    if shape(position)[0] > 1:
        here = op.Where(op.Less(position, ints(0)), position, row)
        return by_row(cache, stored(value, cache), here, shape(position)[0], (2, 0))
    # `ScatterElements` takes an index for every element: all elements of the row have the row's number.
    index = op.Expand(op.Reshape(row, ints(1, 1, 1, 1)), ints(batch, heads, 1, size))
    return op.ScatterElements(cache, index, stored(value, cache), axis=2)


def attention(
    query: Value,
    key_cache: Value,
    value_cache: Value,
    position: Value,
    scale: float,
    softcap: float | None = None,
) -> Value:
    """Return softmax attention over the first position + 1 rows of the cache only."""
    batch, heads, _, dim = shape(query)
    kv_heads = shape(key_cache)[1]
    if shape(position)[0] > 1:
        columns = constant(np.arange(shape(key_cache)[2]), np.int64)
        return _masked(query, key_cache, value_cache, op.LessOrEqual(columns, _column(position)), scale, softcap)
    end = op.Add(position, ints(1))
    keys, values = (loaded(op.Slice(c, ints(0), end, ints(2)), c, dim) for c in (key_cache, value_cache))
    out = op.MatMul(op.Softmax(_logits(query, keys, kv_heads, scale, softcap), axis=-1), values)
    return op.Reshape(out, ints(batch, heads, 1, dim))


def _logits(query: Value, keys: Value, kv_heads: int, scale: float, softcap: float | None) -> Value:
    """Return soft-capped logits [B, Hkv, Hq / Hkv * T, S]: query heads that share keys are rows of one matmul."""
    batch, heads, steps, dim = shape(query)
    grouped = op.Reshape(op.Mul(query, floats(scale)), ints(batch, kv_heads, heads // kv_heads * steps, dim))
    logits = op.MatMul(grouped, op.Transpose(keys, perm=[0, 1, 3, 2]))
    return logits if softcap is None else op.Mul(op.Tanh(op.Div(logits, floats(softcap))), floats(softcap))


def _column(numbers: Value) -> Value:
    """Return int64 [B] as [B, 1, 1, 1]."""
    return op.Reshape(numbers, ints(-1, 1, 1, 1))


def _sections(cache: Value, rows: int) -> Value:
    """Return the row set of each row of the batch, [B, ...] of a cache [V, ...]."""
    share = rows // shape(cache)[0]
    return cache if share == 1 else op.Gather(cache, ints(*(b // share for b in range(rows))), axis=0)


def _masked(
    query: Value,
    key_cache: Value,
    value_cache: Value,
    seen: Value,
    scale: float,
    softcap: float | None,
    sinks: tuple[Value, Value] | None = None,
) -> Value:
    """Return softmax attention to the cached rows that are seen, bool [B, 1, 1, S].

    `sinks`: the query that meets some of the rows, and which rows these are, bool [S].
    """
    batch, heads, _, dim = shape(query)
    keys, values = (loaded(_sections(cache, batch), cache, dim) for cache in (key_cache, value_cache))
    logits = partial(_logits, keys=keys, kv_heads=shape(key_cache)[1], scale=scale, softcap=softcap)
    met = logits(query) if sinks is None else op.Where(sinks[1], logits(sinks[0]), logits(query))
    # A row that is not there sees nothing: the least float32 keeps its softmax a number, and it is zero in the end.
    weights = op.Softmax(op.Where(seen, met, floats(float(np.finfo(np.float32).min))), axis=-1)
    there = op.ReduceMax(cast(seen, TensorProto.FLOAT), ints(3), keepdims=1)
    return op.Mul(op.Reshape(op.MatMul(weights, values), ints(batch, heads, 1, dim)), there)


def context_attention(
    query: Value, keys: Value, values: Value, scale: float, mask: Value | None = None, softcap: float | None = None
) -> Value:
    """Return softmax attention to all tokens of a context."""
    batch, heads, steps, _ = shape(query)
    logits = _logits(query, keys, shape(keys)[1], scale, softcap)
    if mask is not None:
        logits = op.Add(logits, mask)
    return op.Reshape(op.MatMul(op.Softmax(logits, axis=-1), values), ints(batch, heads, steps, shape(values)[3]))


def earlier_key(query: Value, key_cache: Value, position: Value, stride: int) -> tuple[Value, Value]:
    """Return the key one frame earlier for every group of query heads, [B, Hkv, 1, D], and the query grouped alike."""
    batch, heads, _, dim = shape(query)
    kv_heads = shape(key_cache)[1]
    earlier = op.Max(op.Sub(position, ints(stride)), ints(0))
    rows = shape(position)[0]
    if rows == 1:
        key = op.Gather(key_cache, earlier, axis=2)
    else:
        at = op.Expand(_column(earlier), ints(batch, kv_heads, 1, shape(key_cache)[3]))
        key = op.GatherElements(_sections(key_cache, batch), at, axis=2)
    key = loaded(key, key_cache, dim)
    return key, op.Reshape(query, ints(batch, kv_heads, heads // kv_heads, dim))


def fixed_sum(products: Value, *axes: int) -> Value:
    """Return the exact sum of float64 products in units of 2^-24, each rounded and limited, as float32."""
    units = op.Mul(products, constant(1 << TAS_FRACTION_BITS, np.float64))
    least, most = (constant(limit, np.float64) for limit in (-TAS_LIMIT, TAS_LIMIT))
    # A comparison with NaN is False, so NaN and infinities both count as the least value.
    finite = op.Less(op.Abs(units), constant(float("inf"), np.float64))
    whole = cast(op.Where(finite, op.Clip(op.Round(units), least, most), least), TensorProto.INT64)
    return cast(op.ReduceSum(whole, ints(*axes), keepdims=0), TensorProto.FLOAT)


def tas(query: Value, key_cache: Value, position: Value, stride: int, scale: float) -> Value:
    """Return the mean over query heads of scale * <query, key one frame earlier>, summed in integers."""
    key, grouped = (cast(v, TensorProto.DOUBLE) for v in earlier_key(query, key_cache, position, stride))
    total = fixed_sum(op.Mul(grouped, key), 1, 2, 3)
    return op.Mul(total, floats(score_factor(scale, shape(query)[1])))


_FIELDS = np.arange(scores.LEAST_EXPONENT, 255)
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
    factors = np.zeros(shape(query)[1], np.float32)
    factors[list(heads)] = weights
    key, grouped = earlier_key(query, key_cache, position, stride)
    # The product with a weight is float32, as the eager definition rounds it.
    weighted = op.Mul(grouped, constant(factors.reshape(shape(key_cache)[1], -1, 1)))
    products = op.Mul(cast(weighted, TensorProto.DOUBLE), cast(key, TensorProto.DOUBLE))
    return op.Mul(fixed_sum(products, 1, 2, 3), floats(score_factor(scale, 1)))


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


def _finite(values: Value) -> Value:
    """Return whether all values are finite along the last axis."""
    # `ReduceMin` takes no bool in this opset.
    finite = cast(op.Less(op.Abs(values), floats(float("inf"))), TensorProto.INT32)
    return cast(op.ReduceMin(finite, ints(-1), keepdims=0), TensorProto.BOOL)


def learned_score(x: Value, cached: Value, w1: Value, b1: Value, w2: Value, b2: Value) -> Value:
    """Return w2 . relu(w1 @ [x ; |x - cached|] + b1) + b2. The sums of the first layer are exact in float64."""
    features = op.Concat(x, op.Abs(op.Sub(x, cached)), axis=1)
    largest = op.ReduceMax(op.Abs(features), ints(-1), keepdims=1)
    # ONNX cannot read the bits of a float32, so the powers of two up to the largest magnitude are counted.
    reached = cast(op.GreaterOrEqual(largest, constant(np.ldexp(1.0, _FIELDS[1:] - 127))), TensorProto.INT64)
    place = op.ReduceSum(reached, ints(-1), keepdims=1)
    scale, inverse = (
        op.Gather(constant(np.ldexp(1.0, sign * (scores.SCALE_FIELD - _FIELDS))), place, axis=0) for sign in (1, -1)
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


def random_score(step: Value, rows: int, layer: int, share: int = 0) -> Value:
    """Return the hash, made in int64. Every operand is non-negative, so integer division and Mod are exact."""
    by_step, by_row, by_layer = scores.HASH_FACTORS
    prime = ints(scores.HASH_PRIME)
    hashed = [b // share for b in range(shape(step)[0])] if share else range(rows)
    offsets = ints(*((row + 1) * by_row + (layer + 1) * by_layer for row in hashed))
    x = op.Mod(op.Add(op.Mul(op.Max(op.Add(step, ints(1)), ints(0)), ints(by_step)), offsets), prime)
    for offset in scores.HASH_ROUNDS:
        square = op.Mod(op.Mul(x, x), prime)
        fourth = op.Mod(op.Mul(square, square), prime)
        x = op.Mod(op.Add(op.Mul(fourth, x), ints(offset)), prime)
    number = op.Add(op.Div(x, ints(2 ** (31 - scores.HASH_BITS))), ints(1))
    return op.Mul(cast(number, TensorProto.FLOAT), floats(2.0**-scores.HASH_BITS))


def _row_of(position: Value, sinks: int, ring: int) -> Value:
    """Return the rows of positions. Below `sinks` the remainder is not used; its operand stays non-negative."""
    past = op.Max(op.Sub(position, ints(sinks)), ints(0))
    inside = op.Add(op.Mod(past, ints(ring)), ints(sinks))
    return op.Where(op.Less(position, ints(sinks)), position, inside)


def ring_row(position: Value, back: int, sinks: int, ring: int) -> Value:
    """Return the row of the position `back` earlier, clamped to 0."""
    return _row_of(op.Max(op.Sub(position, ints(back)), ints(0)), sinks, ring)


def limit(positions: Value, most: int) -> Value:
    """Return the smaller of both."""
    return op.Min(positions, scalar(most))


def ring_write(cache: Value, value: Value, position: Value, sinks: int) -> Value:
    """Return the cache with one row written, that of `position`."""
    return _written(cache, value, _row_of(position, sinks, shape(cache)[2] - sinks), position)


def window_attention(
    query: Value,
    key_cache: Value,
    value_cache: Value,
    position: Value,
    scale: float,
    sinks: int,
    window: int,
    sink_query: Value | None = None,
    softcap: float | None = None,
) -> Value:
    """Return softmax attention over the sinks that are there and the window's rows, which are gathered."""
    batch, heads, _, dim = shape(query)
    kv_heads, rows = shape(key_cache)[1:3]
    if shape(position)[0] > 1:
        place, row = _column(position), constant(np.arange(rows), np.int64)
        # Row sinks + r of the ring holds the newest position up to the query's that is there.
        last = op.Sub(place, ints(sinks))
        ring = ints(rows - sinks)
        held = op.Add(op.Sub(last, op.Mod(op.Sub(last, op.Sub(row, ints(sinks))), ring)), ints(sinks))
        recent = op.And(op.GreaterOrEqual(held, ints(sinks)), op.Greater(held, op.Sub(place, ints(window))))
        sink = op.Less(row, ints(sinks))
        # onnxruntime has no `Where` of bools.
        seen = op.Or(op.And(sink, op.LessOrEqual(row, place)), op.And(op.Not(sink), recent))
        other = None if sink_query is None else (sink_query, sink)
        return _masked(query, key_cache, value_cache, seen, scale, softcap, other)
    end = op.Add(op.Reshape(position, ints()), scalar(1))
    first = op.Range(scalar(0), op.Min(end, scalar(sinks)), scalar(1))
    recent = op.Range(op.Max(op.Sub(end, scalar(window)), scalar(sinks)), end, scalar(1))
    # Sinks are in the rows of their positions; the window's positions wrap around the ring.
    indices = [first, _row_of(recent, sinks, rows - sinks)] if sinks else [_row_of(recent, sinks, rows)]
    queries = [query if sink_query is None else sink_query, query] if sinks else [query]
    met = [loaded(op.Gather(key_cache, index, axis=2), key_cache, dim) for index in indices]
    parts = [_logits(one, keys, kv_heads, scale, softcap) for one, keys in zip(queries, met, strict=True)]
    # One softmax over both parts: sinks and window share their denominator.
    weights = op.Softmax(op.Concat(*parts, axis=-1) if sinks else parts[0], axis=-1)
    values = op.Gather(value_cache, op.Concat(*indices, axis=0) if sinks else indices[0], axis=2)
    return op.Reshape(op.MatMul(weights, loaded(values, value_cache, dim)), ints(batch, heads, 1, dim))


def draft_gain(x: Value, cached: Value, edges: Value, gains: Value) -> Value:
    """Return the gain of every row; 0 where the change is not a number."""
    change = op.Unsqueeze(input_delta(x, cached), ints(1))
    reached = cast(op.GreaterOrEqual(change, edges), TensorProto.INT64)
    found = op.Gather(gains, op.ReduceSum(reached, ints(1), keepdims=0), axis=0)
    return op.Where(op.IsNaN(op.Squeeze(change, ints(1))), floats(0.0), found)


def draft_difference(both: Value, gain: Value) -> Value:
    """Return the first half of the rows minus gain times the second half."""
    own, cached = op.Split(both, num_outputs=2, axis=0)
    return op.Sub(own, op.Mul(op.Unsqueeze(gain, ints(1)), cached))


def draft_sum(left: Value, cached: Value, bias: Value, gain: Value) -> Value:
    """Return bias + gain * (cached - bias) + left, in this order."""
    kept = op.Mul(op.Unsqueeze(gain, ints(1)), op.Sub(cached, bias))
    return op.Add(op.Add(bias, kept), left)
