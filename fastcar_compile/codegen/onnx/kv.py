"""KV types in ONNX: how a cache stores float32 rows, and how it reads them back, as ops/cached.py defines it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from fastcar_compile.codegen.onnx.values import Value, cast, constant, dtype_name, floats, ints, op, shape
from fastcar_compile.ops.cached import BLOCK, FLOAT16_MAX, INT8_MAX, LEAST_EXPONENT, NOT_A_NUMBER


@dataclass(frozen=True)
class OnnxKvType:
    """One KV type.

    Attributes:
        store: float32 rows -> rows of the cache.
        load: rows of the cache, a head's dimension -> float32 rows.
    """

    store: Callable[[Value], Value]
    load: Callable[[Value, int], Value]


def stored(value: Value, cache: Value) -> Value:
    """Return what the cache keeps of float32 rows."""
    return KV_TYPES[dtype_name(cache)].store(value)


def loaded(rows: Value, cache: Value, dim: int) -> Value:
    """Return rows of the cache as float32 [..., dim], `dim` a head's dimension."""
    return KV_TYPES[dtype_name(cache)].load(rows, dim)


def _store_float16(value: Value) -> Value:
    """Cast rounds half to even."""
    return cast(op.Clip(value, floats(-FLOAT16_MAX), floats(FLOAT16_MAX)), TensorProto.FLOAT16)


def _load_float16(rows: Value, _dim: int) -> Value:
    return cast(rows, TensorProto.FLOAT)


_EXPONENTS = np.arange(LEAST_EXPONENT, 122)
"""Of the blocks of an int8 cache. The last one is that of INT8_MAX."""

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


KV_TYPES: dict[str, OnnxKvType] = {
    "float32": OnnxKvType(store=lambda value: value, load=lambda rows, _dim: rows),
    "float16": OnnxKvType(_store_float16, _load_float16),
    "int8": OnnxKvType(_store_int8, _load_int8),
}
"""By the name of the type in formats.KV_TYPES, which is the dtype of the cache."""
