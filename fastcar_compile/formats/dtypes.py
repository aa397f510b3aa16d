"""Element types of tensors: one entry per type, with its name in every format that the compiler writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fastcar_compile.errors import InternalError


@dataclass(frozen=True)
class DType:
    """One element type.

    Args:
        name: in the manifest; also the attribute of `torch` and of `tvm`.
        safetensors: in the header of a safetensors file.
        numpy: the numpy type of the same bytes.
    """

    name: str
    safetensors: str
    numpy: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float64", "F64", np.dtype(np.float64)),
        DType("float32", "F32", np.dtype(np.float32)),
        DType("float16", "F16", np.dtype(np.float16)),
        DType("bfloat16", "BF16", np.dtype(ml_dtypes.bfloat16)),
        DType("int64", "I64", np.dtype(np.int64)),
        DType("int32", "I32", np.dtype(np.int32)),
        DType("int16", "I16", np.dtype(np.int16)),
        DType("int8", "I8", np.dtype(np.int8)),
        DType("uint8", "U8", np.dtype(np.uint8)),
        DType("bool", "BOOL", np.dtype(np.bool_)),
    )
}
"""By name."""

BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in DTYPES.values()}


def dtype_of(array: np.ndarray[Any, Any]) -> DType:
    """Return the entry of an array's type.

    Raises:
        InternalError: the type is in no table.
    """
    name = array.dtype.name
    if name not in DTYPES:
        raise InternalError(f"there is no format for arrays of {name}")
    return DTYPES[name]
