"""Keys and values of a float16 or int8 cache in ONNX, as ops/cached.py has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnxscript import opset18 as op

from fastcar_compile.ops.cached import BLOCK, FLOAT16_MAX, INT8_MAX, LEAST_EXPONENT, NOT_A_NUMBER

Value = Any
"""A traced ONNX value."""

_EXPONENTS = np.arange(LEAST_EXPONENT, 122)
"""Of the blocks of an int8 cache: the last one is that of INT8_MAX."""

_SCALES = np.ldexp(np.float32(1), np.arange(-128, 127)).astype(np.float32)
_SCALES[0] = np.nan
"""By exponent + 128; ONNX cannot make a float32 of its bits. The first one is NOT_A_NUMBER."""


def _is(cache: Value, kind: int) -> bool:
    return int(cache.dtype) == kind


def _constant(value: Any, dtype: type = np.float32) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, dtype)))


def stored(value: Value, cache: Value) -> Value:
    """What the cache keeps of float32 rows; Cast to float16 and Round round half to even."""
    if _is(cache, onnx.TensorProto.FLOAT16):
        limited = op.Clip(value, _constant(-FLOAT16_MAX), _constant(FLOAT16_MAX))
        return op.Cast(limited, to=onnx.TensorProto.FLOAT16)
    return _blocks(value) if _is(cache, onnx.TensorProto.INT8) else value


def read(rows: Value, cache: Value, dim: int) -> Value:
    """Rows of a cache as float32 [..., dim]; `dim` is a head's dimension."""
    if _is(cache, onnx.TensorProto.FLOAT16):
        return op.Cast(rows, to=onnx.TensorProto.FLOAT)
    if not _is(cache, onnx.TensorProto.INT8):
        return rows
    last, end = _constant([-1], np.int64), _constant([dim], np.int64)
    mantissas = op.Cast(op.Slice(rows, _constant([0], np.int64), end, last), to=onnx.TensorProto.FLOAT)
    exponents = op.Slice(rows, end, _constant([dim + len(_blocks_of(dim))], np.int64), last)
    places = op.Add(op.Cast(exponents, to=onnx.TensorProto.INT64), _constant(128, np.int64))
    scales = op.Gather(_constant(_SCALES), places, axis=0)
    return op.Mul(mantissas, op.Gather(scales, _constant(np.arange(dim) // BLOCK, np.int64), axis=-1))


def _blocks_of(dim: int) -> range:
    return range(0, dim, BLOCK)


def _blocks(value: Value) -> Value:
    """int8 rows. An exponent is the number of those that are too small, counted from the least one."""
    *outer, dim = (int(d) for d in value.shape)
    count = len(_blocks_of(dim))
    limited = op.Clip(value, _constant(-INT8_MAX), _constant(INT8_MAX))
    spare = _constant([*(0 for _ in outer), 0, *(0 for _ in outer), count * BLOCK - dim], np.int64)
    blocks = op.Reshape(op.Pad(limited, spare), _constant([*outer, count, BLOCK], np.int64))
    unknown = op.Cast(op.ReduceMax(op.Cast(op.IsNaN(blocks), to=onnx.TensorProto.INT32), _constant([-1], np.int64)), to=onnx.TensorProto.BOOL)
    known = op.Where(op.IsNaN(blocks), _constant(0.0), blocks)
    top = op.ReduceMax(op.Abs(known), _constant([-1], np.int64))
    bounds = np.ldexp(127.5, _EXPONENTS[:-1])
    places = op.ReduceSum(
        op.Cast(op.GreaterOrEqual(top, _constant(bounds)), to=onnx.TensorProto.INT64), _constant([-1], np.int64)
    )
    inverse = op.Gather(_constant(np.ldexp(1.0, -_EXPONENTS)), places, axis=0)
    mantissas = op.Where(unknown, _constant(0.0), op.Round(op.Mul(known, inverse)))
    exponents = op.Where(unknown, _constant(NOT_A_NUMBER, np.int64), op.Add(places, _constant(LEAST_EXPONENT, np.int64)))
    flat = op.Reshape(op.Cast(mantissas, to=onnx.TensorProto.INT8), _constant([*outer, count * BLOCK], np.int64))
    row = op.Slice(flat, _constant([0], np.int64), _constant([dim], np.int64), _constant([-1], np.int64))
    return op.Concat(row, op.Squeeze(op.Cast(exponents, to=onnx.TensorProto.INT8), _constant([-1], np.int64)), axis=-1)
