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


def _whole(*values: int) -> Value:
    return _constant(values, np.int64)


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
    last, end = _whole(-1), _whole(dim)
    mantissas = op.Cast(op.Slice(rows, _whole(0), end, last), to=onnx.TensorProto.FLOAT)
    exponents = op.Slice(rows, end, _whole(dim + len(_blocks_of(dim))), last)
    places = op.Add(op.Cast(exponents, to=onnx.TensorProto.INT64), _whole(128))
    scales = op.Gather(_constant(_SCALES), places, axis=0)
    return op.Mul(mantissas, op.Gather(scales, _constant(np.arange(dim) // BLOCK, np.int64), axis=-1))


def _blocks_of(dim: int) -> range:
    return range(0, dim, BLOCK)


def _blocks(value: Value) -> Value:
    """int8 rows. An exponent is the number of those that are too small, counted from the least one."""
    *outer, dim = (int(d) for d in value.shape)
    count = len(_blocks_of(dim))
    limited = op.Clip(value, _constant(-INT8_MAX), _constant(INT8_MAX))
    spare = _whole(*([0] * (2 * len(outer) + 1)), count * BLOCK - dim)
    blocks = op.Reshape(op.Pad(limited, spare), _whole(*outer, count, BLOCK))
    missing = op.IsNaN(blocks)
    unknown = op.Greater(op.ReduceMax(op.Cast(missing, to=onnx.TensorProto.FLOAT), _whole(-1)), _constant(0.0))
    known = op.Where(missing, _constant(0.0), blocks)
    too_small = op.GreaterOrEqual(op.ReduceMax(op.Abs(known), _whole(-1)), _constant(np.ldexp(127.5, _EXPONENTS[:-1])))
    places = op.ReduceSum(op.Cast(too_small, to=onnx.TensorProto.INT64), _whole(-1))
    inverse = op.Gather(_constant(np.ldexp(1.0, -_EXPONENTS)), places, axis=0)
    mantissas = op.Where(unknown, _constant(0.0), op.Round(op.Mul(known, inverse)))
    flat = op.Reshape(op.Cast(mantissas, to=onnx.TensorProto.INT8), _whole(*outer, count * BLOCK))
    counted = op.Add(places, _whole(LEAST_EXPONENT))
    exponents = op.Cast(op.Where(unknown, _whole(NOT_A_NUMBER), counted), to=onnx.TensorProto.INT8)
    return op.Concat(op.Slice(flat, _whole(0), _whole(dim), _whole(-1)), op.Squeeze(exponents, _whole(-1)), axis=-1)
