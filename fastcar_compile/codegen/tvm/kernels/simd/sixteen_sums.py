"""Sums across the lanes of 16 vectors of 16 float32 at once, in the order of `add_lanes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, vector

LANES = 16

_Picks = tuple[Sequence[int], Sequence[int]]

_HALVES: _Picks = ([*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)])
"""Lanes of two vectors: both lower halves, both upper halves."""

_QUARTERS: _Picks = (
    [8 * q + lane for q in range(4) for lane in range(4)],
    [8 * q + 4 + lane for q in range(4) for lane in range(4)],
)
"""Four lanes of every eight: the lower, the upper ones."""

_SINGLES: _Picks = (
    [4 * q + lane + of for q in range(4) for lane in (0, 1) for of in (0, LANES)],
    [4 * q + lane + of for q in range(4) for lane in (2, 3) for of in (0, LANES)],
)
"""Of every four lanes the lower or upper two, of the two vectors in turn (vunpcklps, vunpckhps)."""

_PAIRS: _Picks = (
    [4 * q + lane + of for q in range(4) for of in (0, LANES) for lane in (0, 1)],
    [4 * q + lane + of for q in range(4) for of in (0, LANES) for lane in (2, 3)],
)
"""Of every four lanes the lower or upper two, as pairs (vunpcklpd, vunpckhpd)."""


@dataclass(frozen=True)
class SixteenSums:
    """Buffers float32 [4 * 16], which fit registers; one of all vectors would be too large for the stack.

    Attributes:
        vectors: vector j of buffer i becomes sum 4 * j + i.
        mixed: temporary.
    """

    vectors: tuple[Any, Any, Any, Any]
    mixed: Any

    @property
    def result(self) -> Expr:
        """The 16 sums after `add_lanes_of_all`."""
        return self.vectors[0][vector(0, LANES)]


def _pick(buffers: Sequence[Any], numbers: Sequence[int], lanes: Sequence[int]) -> Expr:
    """Return lanes of two vectors, which are the vectors of these numbers of two buffers."""
    return T.Shuffle([b[vector(n, LANES)] for b, n in zip(buffers, numbers, strict=True)], list(lanes))


def _folded(buffer: Any, numbers: Sequence[int], picks: _Picks) -> Expr:
    """Return the sum of both picks of two vectors of a buffer."""
    return _pick([buffer] * 2, numbers, picks[0]) + _pick([buffer] * 2, numbers, picks[1])


def _lane(mixed: Any, number: int) -> Expr:
    """Return lane `number` of every four lanes of the four vectors that were mixed."""
    return _pick([mixed] * 2, (number // 2, 2 + number // 2), _PAIRS[number % 2])


@inlined
def _fold(buffer):
    """Add halves of the four vectors down to four lanes each: one vector."""
    # 16 lanes of a sum become 8, then 4. Every step joins two vectors into one, so no lane is idle.
    buffer[vector(0, LANES)] = _folded(buffer, (0, 1), _HALVES)
    buffer[vector(1, LANES)] = _folded(buffer, (2, 3), _HALVES)
    # After this step vector 0 holds four lanes of each of the buffer's four vectors, in the vectors' order.
    buffer[vector(0, LANES)] = _folded(buffer, (0, 1), _QUARTERS)


def _fold_all(sums: SixteenSums) -> None:
    for buffer in sums.vectors:
        _fold(buffer)


@inlined
def add_lanes_of_all(sums):
    """Write the sum of each vector's lanes to `sums.result`. The order is that of `add_lanes`, bit for bit."""
    _fold_all(sums)
    # A 4 x 4 transpose in two rounds, in every four lanes: of the buffers in pairs here, of the pairs in `_lane`.
    # Then lane 4 j + i belongs to sum 4 j + i.
    sums.mixed[vector(0, LANES)] = _pick(sums.vectors[:2], (0, 0), _SINGLES[0])
    sums.mixed[vector(1, LANES)] = _pick(sums.vectors[:2], (0, 0), _SINGLES[1])
    sums.mixed[vector(2, LANES)] = _pick(sums.vectors[2:], (0, 0), _SINGLES[0])
    sums.mixed[vector(3, LANES)] = _pick(sums.vectors[2:], (0, 0), _SINGLES[1])
    # Lanes 0, 1, 2 and 3 are added in turn, because `add_lanes` does: another order rounds differently.
    sums.vectors[0][vector(0, LANES)] = ((_lane(sums.mixed, 0) + _lane(sums.mixed, 1)) + _lane(sums.mixed, 2)) + _lane(
        sums.mixed, 3
    )
