"""Vector expressions that kernels share: loads, sums of four vectors at once, and the arithmetic fence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

Expr = Any
"""A TIR expression."""

Load = Callable[[int, int], Expr]
"""`load(offset, lanes)`: that many elements from an offset on."""


def row(buffer: Any, index: Sequence[Expr], start: Expr) -> Load:
    """Loads from `start` on along the last axis of a buffer."""
    return lambda offset, lanes: buffer[(*index, T.Ramp(start + offset, 1, lanes))]


def pure(dtype: str, name: str, *arguments: Expr) -> Expr:
    """A call of an LLVM intrinsic without side effects."""
    return T.call_llvm_pure_intrin(dtype, name, *arguments)


def fence(value: Expr) -> Expr:
    """The value, rounded: LLVM must not contract its product with a sum that follows."""
    return pure(str(value.dtype), "llvm.arithmetic.fence", value)


def gather(values: Sequence[Expr]) -> Expr:
    """A vector of scalars."""
    return T.Shuffle(list(values), list(range(len(values))))


def total(vector: Expr, lanes: int) -> Expr:
    """The sum of one int32 vector, a scalar."""
    return pure("int32", f"llvm.vector.reduce.add.v{lanes}i32", vector)


def totals4(vectors: Sequence[Expr], lanes: int) -> Expr:
    """int32x4: the sums of four int32 vectors; a third of the instructions of four single sums."""
    first, second, third, fourth = vectors
    low, high = _interleaved(first, second, lanes, 1), _interleaved(third, fourth, lanes, 1)
    sums = _interleaved(low, high, lanes, 2)
    while lanes > 4:
        half = lanes // 2
        sums = T.Shuffle([sums], list(range(half))) + T.Shuffle([sums], list(range(half, lanes)))
        lanes = half
    return sums


def _interleaved(a: Expr, b: Expr, lanes: int, width: int) -> Expr:
    """In every block of four: runs of `width` lanes of a and b in turn, the block's halves added."""
    runs = [range(start, start + width) for start in range(0, 4, width)]
    order = [which * lanes + lane for run in runs for which in (0, 1) for lane in run]
    halves = [[base + lane for base in range(0, lanes, 4) for lane in part] for part in (order[:4], order[4:])]
    return T.Shuffle([a, b], halves[0]) + T.Shuffle([a, b], halves[1])
