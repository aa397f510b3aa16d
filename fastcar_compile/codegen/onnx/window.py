"""ONNX definitions of the ring cache and of sparse attention; each mirrors the eager one in ops/window.py, at T = 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnxscript import opset18 as op

from fastcar_compile.codegen.onnx.cache import read, stored

Value = Any
"""A traced ONNX value."""


def _ints(*values: int) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(values, np.int64)))


def _scalar(value: int) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, np.int64)))


def _float(value: float) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, np.float32)))


def _shape(value: Value) -> list[int]:
    return [int(d) for d in value.shape]


def _row_of(position: Value, sinks: int, ring: int) -> Value:
    """Rows of positions; below `sinks` the remainder is not used, and its operand is kept from being negative."""
    past = op.Max(op.Sub(position, _ints(sinks)), _ints(0))
    inside = op.Add(op.Mod(past, _ints(ring)), _ints(sinks))
    return op.Where(op.Less(position, _ints(sinks)), position, inside)


def ring_row(position: Value, back: int, sinks: int, ring: int) -> Value:
    """The row of the position `back` earlier, clamped to 0."""
    return _row_of(op.Max(op.Sub(position, _ints(back)), _ints(0)), sinks, ring)


def limit(positions: Value, most: int) -> Value:
    """The smaller of both."""
    return op.Min(positions, _scalar(most))


def ring_write(cache: Value, value: Value, position: Value, sinks: int) -> Value:
    """One row, that of `position`."""
    batch, heads, rows, size = _shape(cache)
    row = _row_of(position, sinks, rows - sinks)
    index = op.Expand(op.Reshape(row, _ints(1, 1, 1, 1)), _ints(batch, heads, 1, size))
    return op.ScatterElements(cache, index, stored(value, cache), axis=2)


def window_attention(
    query: Value,
    key_cache: Value,
    value_cache: Value,
    position: Value,
    scale: float,
    sinks: int,
    window: int,
    sink_query: Value | None = None,
) -> Value:
    """Softmax attention over the sinks that are there and the window's rows, which are gathered."""
    batch, heads, _, dim = _shape(query)
    kv_heads, rows = _shape(key_cache)[1:3]
    end = op.Add(op.Reshape(position, _ints()), _scalar(1))
    first = op.Range(_scalar(0), op.Min(end, _scalar(sinks)), _scalar(1))
    recent = op.Range(op.Max(op.Sub(end, _scalar(window)), _scalar(sinks)), end, _scalar(1))
    indices = [first, _row_of(recent, sinks, rows - sinks)] if sinks else [_row_of(recent, sinks, rows)]
    queries = [query if sink_query is None else sink_query, query] if sinks else [query]

    def logits(one: Value, index: Value) -> Value:
        grouped = op.Mul(op.Reshape(one, _ints(batch, kv_heads, heads // kv_heads, dim)), _float(scale))
        keys = read(op.Gather(key_cache, index, axis=2), key_cache, dim)
        return op.MatMul(grouped, op.Transpose(keys, perm=[0, 1, 3, 2]))

    parts = [logits(one, index) for one, index in zip(queries, indices, strict=True)]
    weights = op.Softmax(op.Concat(*parts, axis=-1) if sinks else parts[0], axis=-1)
    values = op.Gather(value_cache, op.Concat(*indices, axis=0) if sinks else indices[0], axis=2)
    return op.Reshape(op.MatMul(weights, read(values, value_cache, dim)), _ints(batch, heads, 1, dim))


WINDOW = (ring_row, limit, ring_write, window_attention)
