"""The cache, attention over it, and TAS, for one new row; each mirrors the eager definition of the same name.

B batch rows, S cache capacity.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from fastcar_compile.codegen.onnx.kv import loaded, stored
from fastcar_compile.codegen.onnx.values import Value, cast, constant, floats, ints, op, shape
from fastcar_compile.drs.score import TAS_FRACTION_BITS, TAS_LIMIT, score_factor


def cache_write(cache: Value, value: Value, position: Value) -> Value:
    """Return the cache with one row written at `position`. The decode step never writes past the end."""
    batch, heads, _, size = shape(cache)
    # `ScatterElements` takes an index for every element: all elements of the row have the row's number.
    index = op.Expand(op.Reshape(position, ints(1, 1, 1, 1)), ints(batch, heads, 1, size))
    return op.ScatterElements(cache, index, stored(value, cache), axis=2)


def capped(logits: Value, softcap: float | None) -> Value:
    """Return soft-capped logits; None: the logits."""
    return logits if softcap is None else op.Mul(op.Tanh(op.Div(logits, floats(softcap))), floats(softcap))


def attention(
    query: Value, key_cache: Value, value_cache: Value, position: Value, scale: float, softcap: float | None = None
) -> Value:
    """Return softmax attention over the first position + 1 rows of the cache only."""
    batch, heads, _, dim = shape(query)
    kv_heads = shape(key_cache)[1]
    end = op.Add(position, ints(1))
    keys = loaded(op.Slice(key_cache, ints(0), end, ints(2)), key_cache, dim)
    values = loaded(op.Slice(value_cache, ints(0), end, ints(2)), value_cache, dim)
    # Query heads that share keys are the rows of one matmul, which T = 1 makes possible.
    grouped = op.Reshape(query, ints(batch, kv_heads, heads // kv_heads, dim))
    logits = op.MatMul(op.Mul(grouped, floats(scale)), op.Transpose(keys, perm=[0, 1, 3, 2]))
    out = op.MatMul(op.Softmax(capped(logits, softcap), axis=-1), values)
    return op.Reshape(out, ints(batch, heads, 1, dim))


def context_attention(
    query: Value, keys: Value, values: Value, scale: float, mask: Value | None = None, softcap: float | None = None
) -> Value:
    """Return softmax attention to all tokens of a context."""
    batch, heads, steps, dim = shape(query)
    kv_heads = shape(keys)[1]
    grouped = op.Reshape(op.Mul(query, floats(scale)), ints(batch, kv_heads, heads // kv_heads * steps, dim))
    logits = capped(op.MatMul(grouped, op.Transpose(keys, perm=[0, 1, 3, 2])), softcap)
    if mask is not None:
        logits = op.Add(logits, mask)
    return op.Reshape(op.MatMul(op.Softmax(logits, axis=-1), values), ints(batch, heads, steps, shape(values)[3]))


def earlier_key(query: Value, key_cache: Value, position: Value, stride: int) -> tuple[Value, Value]:
    """Return the key one frame earlier for every group of query heads, [B, Hkv, 1, D], and the query grouped alike."""
    batch, heads, _, dim = shape(query)
    kv_heads = shape(key_cache)[1]
    earlier = op.Max(op.Sub(position, ints(stride)), ints(0))
    key = loaded(op.Gather(key_cache, earlier, axis=2), key_cache, dim)
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
