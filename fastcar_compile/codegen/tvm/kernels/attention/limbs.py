"""Integers in digits of a byte, for products with the mantissas of an int8 cache on AVX-512 VNNI: expressions.

A vector holds 64 mantissas, two blocks of a row; its sums are 16 int32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.cache.elements import power_of_two
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, pure

BYTES = 64
LANES = BYTES // 4

DIGITS = 3
"""Bytes of a query's element, and of a weight."""

LEAST = 1e-30
"""A smaller maximum is taken for this one: its inverse stays finite, and what is lost is below it."""


def lanes_of(buffer: Any, vector: Expr) -> Expr:
    """A vector of a buffer of int32 or float32."""
    return buffer[T.Ramp(vector * LANES, 1, LANES)]


def dot(acc: Expr, unsigned: Expr, signed: Expr) -> Expr:
    """vpdpbusd: four products of an unsigned and a signed byte per lane; it does not saturate."""
    return pure(f"int32x{LANES}", f"llvm.x86.avx512.vpdpbusd.{8 * BYTES}", acc, unsigned, signed)


def raised(acc: Expr, bits: int) -> Expr:
    """Times a power of two."""
    return T.shift_left(acc, T.Broadcast(T.int32(bits), LANES))


def unit(largest: Expr, count: float) -> Expr:
    """largest / count; NaN where the largest is none or infinite."""
    return largest * T.float32(1 / count) + (largest - largest)


def halves(a: Expr, b: Expr, lanes: int) -> Expr:
    """A vector of two scalars."""
    return T.Shuffle([T.Broadcast(a, lanes // 2), T.Broadcast(b, lanes // 2)], list(range(lanes)))


def rows_from(row: Callable[[Any], Any], index: Sequence[Any], first: Any, last: Any, count: int) -> list[Any]:
    """Places in a cache of the rows first, first + 1, ...; from `last` on it is the one before it."""
    return [(*index, row(T.min(first + r, last - 1))) for r in range(count)]


def powers_of(cache: Any, places: Sequence[Any], start: Expr, count: int, order: Sequence[int]) -> Expr:
    """2^exponent for `count` exponents of some rows from element `start` on, which `order` numbers row by row."""
    loads = [cache[(*place, T.Ramp(start, 1, count))] for place in places]
    exponents = T.Shuffle(loads * -(-len(order) // (count * len(loads))), list(order))
    return power_of_two(T.Cast(f"int32x{len(order)}", exponents), len(order))
