"""Weighted sums of values of an int8 cache, from integer products.

The weights of a block of rows, times the powers of two of the rows' exponents, are rounded to 24 bits of the largest
one and split in three digits of a byte. The products that a lane adds are those of four rows and one column, so that
bytes of four rows change places first; columns keep the order which that gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.attention.limbs import (
    BYTES,
    LANES,
    LEAST,
    dot,
    halves,
    lanes_of,
    powers_of,
    raised,
    rows_from,
    unit,
)
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import KEYS
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, Expr, magnitudes, prefetch
from fastcar_compile.ops.cached import BLOCK as SHARING

LARGEST = (1 << 24) - (1 << 8)
"""Of a weight's integer, which has no sign; a product with an inverse, rounded, does not reach 2^24."""


@dataclass(frozen=True)
class Shares:
    """Temporaries: what a row's mantissas are multiplied by, for each of `width` // 32 blocks.

    Attributes:
        exact: float32 [8 * lanes]: four rows after the other, in each a block after the other.
        digits: int32, alike: the lowest digits of four rows' integers, then the higher ones; the fourth is 0.
        largest, bound: int32 and float32 [lanes].
    """

    exact: Any
    digits: Any
    largest: Any
    bound: Any


@dataclass(frozen=True)
class Totals:
    """Temporaries: bytes of four rows that change places, int8 [256] each; sums by digit, int32 [width] each,
    because one of all three would be too large for the stack."""

    turned: Any
    columns: Any
    low: Any
    middle: Any
    high: Any


def width_of(d: int) -> int:
    """Columns whose sums fit the registers."""
    return 2 * BYTES if d % (2 * BYTES) == 0 else BYTES


def lanes_for(d: int) -> int:
    """Weights of four rows, one per block of those columns."""
    return KEYS * width_of(d) // SHARING


def place(column: Any) -> Any:
    """In a slot, of the first of four columns: vector i of 64 columns has the quads i of its four lanes of 16."""
    rest = column % BYTES
    return column - rest + rest % 16 // 4 * 16 + rest // 16 * 4


def _interleaved(a: Expr, b: Expr, half: int, run: int) -> Expr:
    """In every 16 bytes: runs of the lower or upper half of a and b in turn (vpunpckl, vpunpckh)."""
    order = [
        which * BYTES + lane + 8 * half + start + byte
        for lane in range(0, BYTES, 16)
        for start in range(0, 8, run)
        for which in (0, 1)
        for byte in range(run)
    ]
    return T.Shuffle([a, b], order)


def _of_two_rows(cache: Any, places: Sequence[Any], start: Expr, half: int) -> Expr:
    a, b = (cache[(*at, T.Ramp(start, 1, BYTES))] for at in places)
    return _interleaved(a, b, half, 1)


def _of_four_rows(turned: Any, half: int, quarter: int) -> Expr:
    a, b = (turned[T.Ramp((2 * p + half) * BYTES, 1, BYTES)] for p in (0, 1))
    return _interleaved(a, b, quarter, 2)


@inlined
def _by_columns(values, rows, start, turned, columns):
    """64 columns of four rows: four vectors, in each lane a column."""
    turned[T.Ramp(0, 1, BYTES)] = _of_two_rows(values, rows[:2], start, 0)
    turned[T.Ramp(BYTES, 1, BYTES)] = _of_two_rows(values, rows[:2], start, 1)
    turned[T.Ramp(2 * BYTES, 1, BYTES)] = _of_two_rows(values, rows[2:], start, 0)
    turned[T.Ramp(3 * BYTES, 1, BYTES)] = _of_two_rows(values, rows[2:], start, 1)
    columns[T.Ramp(0, 1, BYTES)] = _of_four_rows(turned, 0, 0)
    columns[T.Ramp(BYTES, 1, BYTES)] = _of_four_rows(turned, 0, 1)
    columns[T.Ramp(2 * BYTES, 1, BYTES)] = _of_four_rows(turned, 1, 0)
    columns[T.Ramp(3 * BYTES, 1, BYTES)] = _of_four_rows(turned, 1, 1)


@inlined
def _accumulate(total, vector, weights, columns, quarter):
    total[T.Ramp(vector * LANES, 1, LANES)] = dot(
        lanes_of(total, vector), weights, columns[T.Ramp(quarter * BYTES, 1, BYTES)]
    )


def _shares_macro(d: int) -> Callable[..., None]:
    """(values, batch row, kv head, start, at, last, count, row, weights, shares): those of the blocks whose exponents
    are from `start` on, split; bound becomes the unit of their integers."""
    blocks, lanes = width_of(d) // SHARING, lanes_for(d)
    of_blocks = [r * blocks + e for e in range(blocks) for r in range(KEYS)]
    of_digits = [(e * KEYS + r) * 4 + k for e in range(blocks) for k in range(4) for r in range(KEYS)]
    neighbours = [[lane ^ by for lane in range(lanes)] for by in (1, 2)]

    def largest_of(largest: Any, by: int) -> Expr:
        own = largest[T.Ramp(0, 1, lanes)]
        return T.max(own, T.Shuffle([own], neighbours[by]))

    def digits_of(whole: Expr) -> Expr:
        return T.reinterpret(f"int32x{lanes}", T.Shuffle([T.reinterpret(f"int8x{4 * lanes}", whole)], of_digits))

    @inlined
    def split(values, bi, h, start, at, last, count, row, weights, shares):
        shares.largest[T.Ramp(0, 1, lanes)] = T.Broadcast(0, lanes)
        for part in range((count + KEYS - 1) // KEYS):
            shares.exact[T.Ramp(part * lanes, 1, lanes)] = powers_of(
                values, rows_from(row, (bi, h), at + part * KEYS, last, KEYS), start, blocks, of_blocks
            ) * T.Shuffle([weights[T.Ramp(part * KEYS, 1, KEYS)]] * blocks, list(range(lanes)))
            shares.largest[T.Ramp(0, 1, lanes)] = T.max(
                shares.largest[T.Ramp(0, 1, lanes)], magnitudes(shares.exact[T.Ramp(part * lanes, 1, lanes)], lanes)
            )
        shares.largest[T.Ramp(0, 1, lanes)] = largest_of(shares.largest, 0)
        shares.largest[T.Ramp(0, 1, lanes)] = largest_of(shares.largest, 1)
        for v in T.vectorized(lanes):
            shares.bound[v] = T.max(T.float32(LEAST), T.reinterpret("float32", shares.largest[v]))
        for part in range((count + KEYS - 1) // KEYS):
            shares.digits[T.Ramp(part * lanes, 1, lanes)] = digits_of(
                T.Cast(
                    f"int32x{lanes}",
                    T.nearbyint(
                        shares.exact[T.Ramp(part * lanes, 1, lanes)]
                        * (T.Broadcast(T.float32(LARGEST), lanes) / shares.bound[T.Ramp(0, 1, lanes)])
                    ),
                )
            )
        for v in T.vectorized(lanes):
            shares.bound[v] = unit(shares.bound[v], LARGEST)

    return split


def add_macro(d: int) -> Callable[..., None]:
    """(values, batch row, kv head, g, slot, at, last, count, row, ask, weights, kept, sums, shares, totals): sums[slot]
    times `kept`, plus the rows from row(at) on times their weights, which are 0 from `count` on."""
    width, lanes, lines = width_of(d), lanes_for(d), -(-KEYS * (d + d // SHARING) // LINE)
    split = _shares_macro(d)

    def digit(shares: Any, part: Any, chunk: Any, k: int) -> Expr:
        """Of four rows, int8x64: of a block in the lower half, of the next one in the upper."""
        a, b = (shares.digits[part * lanes + (2 * chunk + e) * 4 + k] for e in (0, 1))
        return T.reinterpret(f"int8x{BYTES}", halves(a, b, LANES))

    def total(totals: Any, vector: Any) -> Expr:
        high, middle, low = (lanes_of(t, vector) for t in (totals.high, totals.middle, totals.low))
        lower = T.Cast(f"float32x{LANES}", raised(middle, 8) + low)
        return T.Cast(f"float32x{LANES}", high) * T.Broadcast(T.float32(1 << 16), LANES) + lower

    @inlined
    def add(values, bi, h, g, slot, at, last, count, row, ask, weights, kept, sums, shares, totals):
        for piece in range(d // width):
            split(values, bi, h, d + piece * (width // SHARING), at, last, count, row, weights, shares)
            for v in T.unroll(width // LANES):
                totals.low[T.Ramp(v * LANES, 1, LANES)] = T.Broadcast(0, LANES)
                totals.middle[T.Ramp(v * LANES, 1, LANES)] = T.Broadcast(0, LANES)
                totals.high[T.Ramp(v * LANES, 1, LANES)] = T.Broadcast(0, LANES)
            for part in range((count + KEYS - 1) // KEYS):
                if ask is not None and g + piece == 0:
                    for line in T.unroll(lines):
                        T.evaluate(prefetch(values[bi, h, ask(at + part * KEYS), line * LINE]))
                for c in T.unroll(width // BYTES):
                    _by_columns(
                        values,
                        rows_from(row, (bi, h), at + part * KEYS, last, KEYS),
                        piece * width + c * BYTES,
                        totals.turned,
                        totals.columns,
                    )
                    for v in T.unroll(4):
                        _accumulate(totals.low, 4 * c + v, digit(shares, part, c, 0), totals.columns, v)
                        _accumulate(totals.middle, 4 * c + v, digit(shares, part, c, 1), totals.columns, v)
                        _accumulate(totals.high, 4 * c + v, digit(shares, part, c, 2), totals.columns, v)
            for c in T.unroll(width // BYTES):
                for v in T.unroll(4):
                    sums[slot, T.Ramp(piece * width + (4 * c + v) * LANES, 1, LANES)] = (
                        sums[slot, T.Ramp(piece * width + (4 * c + v) * LANES, 1, LANES)] * T.Broadcast(kept, LANES)
                    ) + total(totals, 4 * c + v) * halves(
                        shares.bound[2 * c * KEYS], shares.bound[(2 * c + 1) * KEYS], LANES
                    )

    return add
