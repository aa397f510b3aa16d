"""What kernels share: vector loads, the sums of four vectors at once, the arithmetic fence.

A kernel's temporaries are buffers without a scope and below 1024 bytes: TVM puts only those on the stack, where LLVM
finds registers for them. A vector that is used twice goes through one, because an expression is a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

Expr = Any
"""A TIR expression."""

Load = Callable[[int, int], Expr]
"""`load(offset, lanes)`: that many elements from an offset on."""


def vector_lanes(d: int) -> int:
    """Lanes of a vector that divides a head's dimension."""
    return next(v for v in (16, 8, 4, 2, 1) if d % v == 0)


def row(buffer: Any, index: Sequence[Expr], start: Expr) -> Load:
    """Loads from `start` on along the last axis of a buffer."""
    return lambda offset, lanes: buffer[(*index, T.Ramp(start + offset, 1, lanes))]


def along(start: Expr, lanes: int) -> Expr:
    """The index of that many elements, or of one. TVM takes a loop with T.nearbyint or T.if_then_else one lane at a
    time, T.vectorized or not; vectors stay vectors."""
    return T.Ramp(start, 1, lanes) if lanes > 1 else start


def spread(value: Expr, lanes: int) -> Expr:
    """A scalar in all lanes; arithmetic does so by itself, T.Select does not."""
    return T.Broadcast(value, lanes) if lanes > 1 else value


def typed(dtype: str, lanes: int) -> str:
    """The type of a vector, or of a scalar."""
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


def cast(dtype: str, value: Expr, lanes: int) -> Expr:
    """A conversion, lane by lane."""
    return T.Cast(typed(dtype, lanes), value)


def magnitudes(values: Expr, lanes: int) -> Expr:
    """Bits of float32 without their sign, int32: in the order of the magnitudes, a NaN above them all."""
    return T.bitwise_and(T.reinterpret(typed("int32", lanes), values), spread(T.int32(0x7FFFFFFF), lanes))


def pure(dtype: str, name: str, *arguments: Expr) -> Expr:
    """A call of an LLVM intrinsic without side effects."""
    return T.call_llvm_pure_intrin(dtype, name, *arguments)


def fence(dtype: str, value: Expr) -> Expr:
    """The value, rounded: LLVM must not contract its product with a sum that follows."""
    return pure(dtype, "llvm.arithmetic.fence", value)


def gather(values: Sequence[Expr]) -> Expr:
    """A vector of scalars."""
    return T.Shuffle(list(values), list(range(len(values))))


def lane_total(vector: Expr, lanes: int) -> Expr:
    """The sum of one int32 vector, a scalar."""
    return pure("int32", f"llvm.vector.reduce.add.v{lanes}i32", vector)


def interleaved(a: Expr, b: Expr, lanes: int, width: int) -> Expr:
    """In every block of four: runs of `width` lanes of a and b in turn, the block's halves added.

    The sums of four vectors a, b, c, d cost a third of four single sums as `folded` of
    interleaved(interleaved(a, b, 1), interleaved(c, d, 1), 2).
    """
    runs = [range(start, start + width) for start in range(0, 4, width)]
    order = [which * lanes + lane for run in runs for which in (0, 1) for lane in run]
    halves = [[base + lane for base in range(0, lanes, 4) for lane in part] for part in (order[:4], order[4:])]
    return T.Shuffle([a, b], halves[0]) + T.Shuffle([a, b], halves[1])


def folded(load: Load, lanes: int) -> Expr:
    """int32x4: lanes that are equal modulo four, added."""
    sums = load(0, 4)
    for offset in range(4, lanes, 4):
        sums = sums + load(offset, 4)
    return sums


PREFETCH_BYTES = 1 << 15
"""How far ahead rows that are read side by side are asked for, as keys and values are. The second cache keeps more
misses under way than the first."""

NEAR_BYTES = 1 << 9
"""How far ahead one stream is asked for. Measured: 256 to 1024 are alike, beyond a page it gets slower."""

LINE = 64
"""Bytes of a cache line."""


def ahead(rows: int, row_bytes: int) -> tuple[int, int]:
    """Weight rows, and bytes of a row, by which to prefetch while `rows` of them are read together."""
    return (0, NEAR_BYTES) if rows == 1 else (max(rows, -(-PREFETCH_BYTES // row_bytes)), 0)


def prefetch(element: Expr) -> Expr:
    """Ask for the line of a buffer's element, into the second cache; it may lie past the buffer's end."""
    return T.call_intrin("void", "tirx.prefetch", T.address_of(element), 0, 2, 1)
