"""The active rows of activations, and the tiles of their products with weight rows.

A row that replays is zero, so a zero row is inactive: no kernel multiplies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, intrinsic, ramp

SCAN_LANES = 16


@dataclass(frozen=True)
class ActiveRows:
    """Temporaries: `rows` int32 [m] holds the numbers of the active rows, `count` int32 [1] how many they are."""

    rows: Any
    count: Any


@inlined
def append_active(active, i):
    """Append row i to the active rows."""
    active.rows[active.count[0]] = i
    active.count[0] += 1


@inlined
def or_int8(q, i, k, bits):
    """Write the bitwise or of row i of q int8 [m, k] to bits uint32 [16]. With k = 0 that is zero."""
    found = T.alloc_buffer((SCAN_LANES,), "int8")
    found[ramp(0, SCAN_LANES)] = T.Broadcast(T.int8(0), SCAN_LANES)
    # c: 16 bytes at a time. found stays in a register, and a row is read once.
    for c in range(k // SCAN_LANES):
        found[ramp(0, SCAN_LANES)] = T.bitwise_or(found[ramp(0, SCAN_LANES)], q[i, ramp(c * SCAN_LANES, SCAN_LANES)])
    for t in range(k % SCAN_LANES):
        found[0] = T.bitwise_or(found[0], q[i, k // SCAN_LANES * SCAN_LANES + t])
    # 32-bit lanes, so that `is_zero` is one reduction for both types of rows.
    bits[ramp(0, SCAN_LANES)] = T.Cast(f"uint32x{SCAN_LANES}", found[ramp(0, SCAN_LANES)])


@inlined
def or_float32(x, i, k, bits):
    """Write the bitwise or of row i of x float32 [m, k] to bits uint32 [16], without signs: -0 is zero too."""
    bits[ramp(0, SCAN_LANES)] = T.Broadcast(T.uint32(0), SCAN_LANES)
    for c in range(k // SCAN_LANES):
        bits[ramp(0, SCAN_LANES)] = T.bitwise_or(
            bits[ramp(0, SCAN_LANES)],
            T.shift_left(
                T.reinterpret(f"uint32x{SCAN_LANES}", x[i, ramp(c * SCAN_LANES, SCAN_LANES)]),
                T.Broadcast(T.uint32(1), SCAN_LANES),
            ),
        )
    for t in range(k % SCAN_LANES):
        bits[0] = T.bitwise_or(
            bits[0], T.shift_left(T.reinterpret("uint32", x[i, k // SCAN_LANES * SCAN_LANES + t]), T.uint32(1))
        )


def is_zero(bits: Expr) -> Expr:
    """Return whether bits uint32 [16] are all zero."""
    return intrinsic("uint32", f"llvm.vector.reduce.or.v{SCAN_LANES}i32", bits[ramp(0, SCAN_LANES)]) == T.uint32(0)


@dataclass(frozen=True)
class ZeroRows:
    """What a zero row gives: y float32 [m, n], s float32 [m], and for a scale per channel ws float32 [n]."""

    y: Any
    s: Any
    ws: Any = None

    def value(self, i: Expr, j: Expr) -> Expr:
        """Return the rounding steps of the formula: a scale that is no number stays visible."""
        return T.float32(0) * (self.s[i] if self.ws is None else self.s[i] * self.ws[j])


@inlined
def find_active(q, shape, active, zero):
    """List the active rows of q int8 [m, k]; write the results of the others. `shape` is (m, n, k)."""
    active.count[0] = 0
    for i in range(shape[0]):
        bits = T.alloc_buffer((SCAN_LANES,), "uint32")
        or_int8(q, i, shape[2], bits)
        if is_zero(bits):
            # No tile covers an inactive row, so its results are written here.
            for j in range(shape[1]):
                zero.y[i, j] = zero.value(i, j)
        else:
            append_active(active, i)


@dataclass(frozen=True)
class Tile:
    """The outputs of `rows` weight rows from j on by `columns` active rows from i on, row-major."""

    j: Any
    i: Any
    rows: int
    columns: int

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return self.rows * self.columns

    def weight_row(self, output: Expr) -> Expr:
        """Return the weight row of an output."""
        return self.j + output // self.columns

    def active_row(self, output: Expr) -> Expr:
        """Return the position of an output's row among the active rows."""
        return self.i + output % self.columns


TileMacro = Callable[[Any, Tile], None]
"""A macro (operands, tile) that writes the tile's outputs."""


@dataclass(frozen=True)
class Tiling:
    """n weight rows in tiles of `rows` by `columns`; `loop` is T.parallel or T.serial."""

    n: int
    rows: int
    columns: int
    loop: Any


@inlined
def for_tiles(tiling, multiply, o, count):
    """Call multiply(o, tile) for the tiles of all weight rows and `count` active rows.

    The outer loop, which may be parallel, goes over weight rows. Those of one iteration meet every active row, so each
    weight is read from memory once. Remainders are tiles of one active row, or of the last weight rows.
    """
    # jo: tiles of weight rows. io: tiles of active rows, which meet the weights while these are in the cache.
    for jo in tiling.loop(tiling.n // tiling.rows):
        for io in range(count // tiling.columns):
            multiply(o, Tile(jo * tiling.rows, io * tiling.columns, tiling.rows, tiling.columns))
        # Active rows that do not fill a tile, one at a time.
        if tiling.columns > 1:
            for io in range(count % tiling.columns):
                multiply(o, Tile(jo * tiling.rows, count // tiling.columns * tiling.columns + io, tiling.rows, 1))
    # Weight rows that do not fill a tile, after the loop: they are fewer than one iteration's.
    if tiling.n % tiling.rows > 0:
        for io in range(count):
            multiply(o, Tile(tiling.n // tiling.rows * tiling.rows, io, tiling.n % tiling.rows, 1))
