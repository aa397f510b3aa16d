"""Integers in limbs of a byte, for products with the mantissas of an int8 cache on AVX-512 VNNI.

vpdpbusd multiplies bytes, so a 21 or 24 bit integer takes three products, one per limb. A vector holds 64 mantissas,
which are two blocks of a row, and its sums are 16 int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.cache.elements import power_of_two
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr

VECTOR_BYTES = 64
SUMS = VECTOR_BYTES // 4
"""int32 sums of a vector."""

LIMBS = 3
"""Of a query's element, and of a weight."""

SMALLEST = 1e-30
"""A smaller maximum is taken for this one. Its inverse stays finite, and what is lost is below it."""


def shift_sums(acc: Expr, bits: int) -> Expr:
    """Return a vector of sums times 2^bits."""
    return T.shift_left(acc, T.Broadcast(T.int32(bits), SUMS))


def unit(largest: Expr, count: float) -> Expr:
    """Return largest / count, NaN where the largest is a NaN or infinite."""
    # largest - largest is 0, or NaN for a NaN and for infinity.
    return largest * T.float32(1 / count) + (largest - largest)


def two_halves(a: Expr, b: Expr, lanes: int) -> Expr:
    """Return a vector of two scalars: a in the lower half, b in the upper half."""
    return T.Shuffle([T.Broadcast(a, lanes // 2), T.Broadcast(b, lanes // 2)], list(range(lanes)))


def block_scales(cache: Any, rows: Sequence[Any], start: Expr, count: int, order: Sequence[int]) -> Expr:
    """Return 2^exponent of `count` exponents per row from element `start` on. `order` numbers them row by row."""
    # One load brings all exponents of a row, and the shuffle puts them in the order of the lanes.
    loads = [cache[(*row, T.Ramp(start, 1, count))] for row in rows]
    # A TVM shuffle has at most as many lanes as its operands together, so the loads are repeated.
    exponents = T.Shuffle(loads * -(-len(order) // (count * len(loads))), list(order))
    return power_of_two(T.Cast(f"int32x{len(order)}", exponents), len(order))
