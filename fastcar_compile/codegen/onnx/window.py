"""Sparse attention over a ring cache, for one new row; each mirrors the eager definition in ops/window.py."""

from __future__ import annotations

from fastcar_compile.codegen.onnx.attention import capped
from fastcar_compile.codegen.onnx.kv import loaded, stored
from fastcar_compile.codegen.onnx.values import Value, floats, ints, op, scalar, shape


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
    batch, heads, rows, size = shape(cache)
    row = _row_of(position, sinks, rows - sinks)
    index = op.Expand(op.Reshape(row, ints(1, 1, 1, 1)), ints(batch, heads, 1, size))
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
    softcap: float | None = None,
) -> Value:
    """Return softmax attention over the sinks that are there and the window's rows, which are gathered."""
    batch, heads, _, dim = shape(query)
    kv_heads, rows = shape(key_cache)[1:3]
    end = op.Add(op.Reshape(position, ints()), scalar(1))
    first = op.Range(scalar(0), op.Min(end, scalar(sinks)), scalar(1))
    recent = op.Range(op.Max(op.Sub(end, scalar(window)), scalar(sinks)), end, scalar(1))
    # Sinks are in the rows of their positions; the window's positions wrap around the ring.
    indices = [first, _row_of(recent, sinks, rows - sinks)] if sinks else [_row_of(recent, sinks, rows)]
    queries = [query if sink_query is None else sink_query, query] if sinks else [query]

    def logits(one: Value, index: Value) -> Value:
        grouped = op.Mul(op.Reshape(one, ints(batch, kv_heads, heads // kv_heads, dim)), floats(scale))
        keys = loaded(op.Gather(key_cache, index, axis=2), key_cache, dim)
        return capped(op.MatMul(grouped, op.Transpose(keys, perm=[0, 1, 3, 2])), softcap)

    parts = [logits(one, index) for one, index in zip(queries, indices, strict=True)]
    # One softmax over both parts: sinks and window share their denominator.
    weights = op.Softmax(op.Concat(*parts, axis=-1) if sinks else parts[0], axis=-1)
    values = op.Gather(value_cache, op.Concat(*indices, axis=0) if sinks else indices[0], axis=2)
    return op.Reshape(op.MatMul(weights, loaded(values, value_cache, dim)), ints(batch, heads, 1, dim))
