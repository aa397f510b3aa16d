"""Rows of a cache in a kernel, whatever its type: ops/cached.py defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.simd.float16 import to_float32
from fastcar_compile.codegen.tvm.kernels.simd.vectors import spread, typed
from fastcar_compile.formats import KV_TYPES
from fastcar_compile.ops.cached import BIAS, BLOCK, MANTISSA_BITS


def element_bytes(dtype: str) -> int:
    """Of an element of a cache."""
    return KV_TYPES[dtype].bits // 8


def row_bytes(dim: int, dtype: str) -> int:
    """Of the row of one key or value of one head."""
    return KV_TYPES[dtype].row_bytes(dim)


def element(rows: Any, index: Sequence[Any], start: Any, offset: Any, dim: int, dtype: str, isa: InstructionSet) -> Any:
    """Element start + offset of the row at `index`, as float32; `start` and it lie in one block of 32.

    A vector's lane is in `offset`, so that its lanes share one exponent.
    """
    value = rows[(*index, start + offset)]
    if dtype != "int8":
        return to_float32(value, dtype, isa)
    return T.Cast("float32", value) * power_of_two(T.Cast("int32", rows[(*index, dim + start // BLOCK)]))


def chunks_of_block(dim: int, dtype: str, lanes: int) -> int:
    """Vectors of a row that have one exponent; 1 where it has none of its own."""
    return max(1, BLOCK // lanes) if dtype == "int8" and dim % BLOCK == 0 else 1


def weighted(
    weight: Any, rows: Any, index: Sequence[Any], start: Any, offset: Any, dim: int, dtype: str, isa: InstructionSet
) -> Any:
    """weight * element; a block's exponent meets the weight, once for all lanes."""
    if dtype != "int8":
        return weight * element(rows, index, start, offset, dim, dtype, isa)
    exponent = T.Cast("int32", rows[(*index, dim + start // BLOCK)])
    return T.Cast("float32", rows[(*index, start + offset)]) * (weight * power_of_two(exponent))


def product(
    query: Callable[[Any], Any],
    rows: Any,
    index: Sequence[Any],
    start: Any,
    offset: Any,
    lanes: int,
    dim: int,
    dtype: str,
    isa: InstructionSet,
) -> Any:
    """Lane `offset` of the product of a query and a row, summed over the `chunks_of_block` vectors from `start` on."""
    chunks = chunks_of_block(dim, dtype, lanes)
    if chunks == 1:
        return query(start + offset) * element(rows, index, start, offset, dim, dtype, isa)
    places = [start + i * lanes + offset for i in range(chunks)]
    total = query(places[0]) * T.Cast("float32", rows[(*index, places[0])])
    for at in places[1:]:
        total = total + query(at) * T.Cast("float32", rows[(*index, at)])
    return total * power_of_two(T.Cast("int32", rows[(*index, dim + start // BLOCK)]))


def power_of_two(exponent: Any, lanes: int = 1) -> Any:
    """2^exponent of int32, by its bits; -128, which is NaN, gives minus infinity, whose product with 0 is one."""
    biased = exponent + spread(T.int32(BIAS), lanes)
    return T.reinterpret(typed("float32", lanes), T.shift_left(biased, spread(T.int32(MANTISSA_BITS), lanes)))
