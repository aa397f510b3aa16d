"""Keys and values of a float16 cache in ONNX, as ops/attention.py has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnxscript import opset18 as op

from fastcar_compile.ops.attention import FLOAT16_MAX

Value = Any
"""A traced ONNX value."""


def _is_half(cache: Value) -> bool:
    return int(cache.dtype) == onnx.TensorProto.FLOAT16


def _limit(value: float) -> Value:
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, np.float32)))


def stored(value: Value, cache: Value) -> Value:
    """What the cache keeps of float32 values; Cast rounds half to even."""
    if not _is_half(cache):
        return value
    return op.Cast(op.Clip(value, _limit(-FLOAT16_MAX), _limit(FLOAT16_MAX)), to=onnx.TensorProto.FLOAT16)


def read(rows: Value, cache: Value) -> Value:
    """Rows of a cache as float32."""
    return op.Cast(rows, to=onnx.TensorProto.FLOAT) if _is_half(cache) else rows
