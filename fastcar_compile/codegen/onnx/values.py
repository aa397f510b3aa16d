"""What the ONNX definitions share: the operators, the type of a traced value, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnxscript import opset18

if TYPE_CHECKING:
    from onnxscript.ir import Value
else:
    Value = Any  # torch's exporter reads the annotations, and takes a class with a `dtype` for one tensor type

op: Any = opset18
"""The operators. While a definition is traced, each takes and returns a `Value`, which its annotations do not say."""


def constant(value: object, dtype: type = np.float32) -> Value:
    """Return a constant of this shape and dtype."""
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, dtype)))


def ints(*values: int) -> Value:
    """Return an int64 vector."""
    return constant(values, np.int64)


def scalar(value: int) -> Value:
    """Return one int64 without an axis."""
    return constant(value, np.int64)


def int32(value: int) -> Value:
    """Return one int32."""
    return constant(value, np.int32)


def uint8(value: int) -> Value:
    """Return one uint8."""
    return constant(value, np.uint8)


def floats(value: float | Sequence[float]) -> Value:
    """Return float32 values."""
    return constant(value)


def shape(value: Value) -> list[int]:
    """Return the shape of a traced value; every shape is static."""
    assert value.shape is not None
    return list(value.shape.numpy())


def dtype_name(value: Value) -> str:
    """Return numpy's name of the type of a traced value."""
    assert value.dtype is not None
    return value.dtype.numpy().name


def cast(value: Value, to: int) -> Value:
    """Return the value as another type, a member of TensorProto."""
    return op.Cast(value, to=to)
