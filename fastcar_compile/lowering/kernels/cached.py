"""Rows of a cache in a kernel, whatever its type: ops/cached.py defines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.lowering.isa import InstructionSet
from fastcar_compile.lowering.kernels.half import widened
from fastcar_compile.ops.cached import BIAS, BLOCK, MANTISSA_BITS, row_size

_BYTES = {"float32": 4, "float16": 2, "int8": 1}


def element_bytes(dtype: str) -> int:
    """Of an element of a cache."""
    return _BYTES[dtype]


def row_bytes(dim: int, dtype: str) -> int:
    """Of the row of one key or value of one head."""
    return row_size(dim, dtype) * _BYTES[dtype]


def element(rows: Any, index: Sequence[Any], start: Any, offset: Any, dim: int, dtype: str, isa: InstructionSet) -> Any:
    """Element start + offset of the row at `index`, as float32; `start` and it lie in one block of 32.

    A vector's lane is in `offset`, so that its lanes share one exponent.
    """
    value = rows[(*index, start + offset)]
    if dtype != "int8":
        return widened(value, dtype, isa)
    return T.Cast("float32", value) * power_of_two(T.Cast("int32", rows[(*index, dim + start // BLOCK)]))


def power_of_two(exponent: Any) -> Any:
    """2^exponent of an int32 expression, by its bits; -128 gives minus infinity, whose product with 0 is a NaN."""
    return T.reinterpret("float32", T.shift_left(exponent + T.int32(BIAS), T.int32(MANTISSA_BITS)))
