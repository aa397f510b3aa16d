"""What the parts of exact attention share: the shape, the operands, and the temporaries of one query row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile import exact
from fastcar_compile.codegen.tvm.kernels.gate.fixed_point import NOT_A_NUMBER
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, vector_lanes
from fastcar_compile.ops.cached import BLOCK, LEAST_EXPONENT, MANTISSA_BITS, excess, rounds_up

UNSEEN = -1
"""Numerator of a cache row that the query does not see."""


def tiles_of(rows: Any) -> Any:
    """Return the tiles that hold so many rows."""
    return (rows + BLOCK - 1) // BLOCK


@dataclass(frozen=True)
class ExactShape:
    """D, S, and (sinks, window) of a ring cache."""

    d: int
    s: int
    window: tuple[int, int] | None

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.d // BLOCK)

    @property
    def lanes(self) -> int:
        """Lanes of vectors that no block's end cuts."""
        return vector_lanes(self.d)

    def sees(self, row: Expr, position: Expr, newest: Expr) -> Expr:
        """Return whether the token at `position` sees a cache row, in a cache written up to `newest`."""
        if self.window is None:
            return row <= position
        sinks, size = self.window
        ring = self.s - sinks
        # last: the ring's row of the newest position. Rows behind it are one turn older.
        last = T.truncmod(T.max(newest - sinks, 0), ring)
        held = newest - (last - (row - sinks)) - T.Select(row - sinks > last, ring, 0)
        # A row that holds a position below `sinks` was never written in the ring.
        # Positions up to position - size are outside the window.
        recent = T.And(T.And(held >= sinks, held > position - size), held <= position)
        return T.Or(T.And(row < sinks, row <= position), T.And(row >= sinks, recent))


@dataclass(frozen=True)
class ExactOperands:
    """The arguments of the kernel, and b, query head, key/value head, query row."""

    q: Any
    keys: Any
    values: Any
    table: Any
    y: Any
    at: tuple[Expr, Expr, Expr, Expr]


@dataclass(frozen=True)
class RoundedQuery:
    """mantissas int32 [D], exponents int32 [n], and int32 [1]: whether it holds a NaN."""

    mantissas: Any
    exponents: Any
    unknown: Any


@dataclass(frozen=True)
class RowSums:
    """Temporaries of one query row.

    Attributes:
        logits: float32 [S] and whole tiles. weights: int32, alike, the numerators.
        scaled: float32 [32], numerators of a tile times powers of two. integers: int32 [33], these as a wide block, and
            its exponent.
        acc: int32 [32], sums. total: float32 [1], of a logit.
    """

    logits: Any
    weights: Any
    scaled: Any
    integers: Any
    acc: Any
    total: Any


def wide_exponent(bits: Expr) -> Expr:
    """Return the exponent of a wide block whose largest magnitude has these bits."""
    # The carry is where the largest mantissa would round up to 2^14.
    field = T.shift_right(bits + T.int32(rounds_up(exact.WIDE_BITS)), T.int32(MANTISSA_BITS))
    return T.max(field - T.int32(excess(exact.WIDE_BITS)), T.int32(LEAST_EXPONENT))


def not_a_number() -> Expr:
    return T.reinterpret("float32", T.int32(NOT_A_NUMBER))
