"""Elements of cached rows as float32, whatever type the cache has. ops/cached.py defines them bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.simd.float16 import to_float32
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, broadcast, vector_type
from fastcar_compile.formats import kv_type
from fastcar_compile.ops.cached import BIAS, MANTISSA_BITS

Row = Callable[[Expr], Expr]
"""Row of a buffer: index along the last axis -> element."""


def row_at(rows: Any, *index: Expr) -> Row:
    """Return the row of a buffer at an index."""
    return lambda c: rows[(*index, c)]


def power_of_two(exponent: Expr, lanes: int = 1) -> Expr:
    """Return 2^exponent of int32, by its bits. -128 (NaN) gives minus infinity, whose product with 0 is a NaN."""
    biased = exponent + broadcast(T.int32(BIAS), lanes)
    return T.reinterpret(vector_type("float32", lanes), T.shift_left(biased, broadcast(T.int32(MANTISSA_BITS), lanes)))


@dataclass(frozen=True)
class RowFormat:
    """How a kernel for `isa` reads rows of heads of `dim` elements from a cache of `dtype`.

    An element is at start + offset. A vector's lane is in `offset`, and start and start + offset are in one block of
    the exponents, so that the lanes share one exponent.
    """

    dim: int
    dtype: str
    isa: InstructionSet

    @property
    def size(self) -> int:
        """Elements of a cached row, exponents included."""
        return kv_type(self.dtype).row_size(self.dim)

    @property
    def bytes(self) -> int:
        """Bytes of a cached row."""
        return kv_type(self.dtype).row_bytes(self.dim)

    def elements_of(self, size: int) -> int:
        """Return how many elements `size` bytes hold."""
        return size * 8 // kv_type(self.dtype).bits

    def vectors_of_block(self, lanes: int) -> int:
        """Return the vectors of a row that share an exponent, 1 where rows have none or end within a block."""
        block = kv_type(self.dtype).block
        return max(1, block // lanes) if block and self.dim % block == 0 else 1

    def element(self, row: Row, start: Expr, offset: Expr) -> Expr:
        """Return an element as float32."""
        value = row(start + offset)
        if not kv_type(self.dtype).block:
            return to_float32(value, self.dtype, self.isa)
        return T.Cast("float32", value) * self._scale(row, start)

    def weighted(self, weight: Expr, row: Row, start: Expr, offset: Expr) -> Expr:
        """Return weight * element. The exponent meets the weight, once for all lanes."""
        if not kv_type(self.dtype).block:
            return weight * self.element(row, start, offset)
        scale = self._scale(row, start)
        return T.Cast("float32", row(start + offset)) * (weight * scale)

    def product(self, query: Row, row: Row, start: Expr, offset: Expr, lanes: int) -> Expr:
        """Return lane `offset` of query * row, summed over the `vectors_of_block` vectors from `start` on."""
        vectors = self.vectors_of_block(lanes)
        if vectors == 1:
            return query(start + offset) * self.element(row, start, offset)
        # All vectors of the block share an exponent: their products are summed first and scaled once.
        first, *rest = [start + i * lanes + offset for i in range(vectors)]
        total = query(first) * T.Cast("float32", row(first))
        for at in rest:
            total = total + query(at) * T.Cast("float32", row(at))
        return total * self._scale(row, start)

    def _scale(self, row: Row, start: Expr) -> Expr:
        return power_of_two(T.Cast("int32", row(self.dim + start // kv_type(self.dtype).block)))
