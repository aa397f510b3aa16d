"""Vector building blocks: loads, casts, sums across lanes, the arithmetic fence, prefetches.

Temporaries of a kernel are buffers without a scope and below 1024 bytes. TVM puts only those on the stack, and LLVM
keeps them in registers. A vector that is used twice goes through such a buffer, because a TIR expression is a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.script import inlined

Expr = Any
"""A TIR expression."""

Load = Callable[[int, int], Expr]
"""`load(offset, lanes)`: `lanes` elements from `offset` on."""


def vector_lanes(d: int) -> int:
    """Return the most lanes, at most 16, of vectors that cover a head dimension of d."""
    return next(v for v in (16, 8, 4, 2, 1) if d % v == 0)


def vector(number: Expr, lanes: int) -> Expr:
    """Return the index of a buffer's vector of that number."""
    return T.Ramp(number * lanes, 1, lanes)


def load_from(buffer: Any, index: Sequence[Expr], start: Expr) -> Load:
    """Return loads from `start` on along the last axis of a buffer."""
    return lambda offset, lanes: buffer[(*index, T.Ramp(start + offset, 1, lanes))]


def ramp(start: Expr, lanes: int) -> Expr:
    """Return the index of `lanes` elements, or of one element.

    TVM scalarises a T.vectorized loop that holds T.nearbyint or T.if_then_else. A vector index keeps vectors.
    """
    return T.Ramp(start, 1, lanes) if lanes > 1 else start


def broadcast(value: Expr, lanes: int) -> Expr:
    """Return a scalar in all lanes. Arithmetic broadcasts by itself, T.Select does not."""
    return T.Broadcast(value, lanes) if lanes > 1 else value


def vector_type(dtype: str, lanes: int) -> str:
    """Return TVM's name of a vector type, or of the scalar type for one lane."""
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


def cast(dtype: str, value: Expr, lanes: int) -> Expr:
    """Return a value of `lanes` lanes as another type."""
    return T.Cast(vector_type(dtype, lanes), value)


def magnitude_bits(values: Expr, lanes: int) -> Expr:
    """Return the bits of float32 without their sign, as int32. They sort as magnitudes do, a NaN above all."""
    return T.bitwise_and(T.reinterpret(vector_type("int32", lanes), values), broadcast(T.int32(0x7FFFFFFF), lanes))


def intrinsic(dtype: str, name: str, *arguments: Expr) -> Expr:
    """Return the call of an LLVM intrinsic without side effects."""
    return T.call_llvm_pure_intrin(dtype, name, *arguments)


def vpdpbusd(acc: Expr, unsigned: Expr, signed: Expr, width: int) -> Expr:
    """Return acc plus four products of an unsigned and a signed byte per int32 lane. It does not saturate."""
    return intrinsic(f"int32x{width // 4}", f"llvm.x86.avx512.vpdpbusd.{width * 8}", acc, unsigned, signed)


def flip_sign(values: Expr, width: int) -> Expr:
    """Return int8 plus 128 as unsigned bytes: of two's complement that is the sign bit inverted."""
    return T.bitwise_xor(values, T.Broadcast(T.int8(-128), width))


def fence(dtype: str, value: Expr) -> Expr:
    """Return the value, rounded to its type: LLVM must not contract its product with a sum that follows."""
    return intrinsic(dtype, "llvm.arithmetic.fence", value)


def vector_of(values: Sequence[Expr]) -> Expr:
    """Return a vector of scalars."""
    return T.Shuffle(list(values), list(range(len(values))))


def reduce_add(values: Expr, lanes: int) -> Expr:
    """Return the sum of an int32 vector's lanes."""
    return intrinsic("int32", f"llvm.vector.reduce.add.v{lanes}i32", values)


@inlined
def add_lanes(acc, start, lanes):
    """Add the float32 acc[start .. start + lanes - 1] into acc[start], in one order for every instruction set.

    Halves are added as vectors down to four lanes, then lanes 1, 2 and 3 in turn.
    """
    # `lanes` is a number, so these branches are decided when the kernel is made.
    if lanes >= 32:
        for v in T.vectorized(16):
            acc[start + v] += acc[start + v + 16]
    if lanes >= 16:
        for v in T.vectorized(8):
            acc[start + v] += acc[start + v + 8]
    if lanes >= 8:
        for v in T.vectorized(4):
            acc[start + v] += acc[start + v + 4]
    # The last four lanes are scalar and in turn, on every instruction set.
    for v in T.unroll(min(lanes, 4) - 1):
        acc[start] += acc[start + v + 1]


def interleave_add(a: Expr, b: Expr, lanes: int, run: int) -> Expr:
    """Return, for every block of four lanes, runs of `run` lanes of a and b in turn, with the block's halves added.

    `interleave_fours` takes three of them for the sums of four vectors: a third of the cost of four `reduce_add`.
    """
    # Runs of one: (a0, b0, a1, b1) + (a2, b2, a3, b3) in every block of four lanes.
    # Runs of two: (a0, a1, b0, b1) + (a2, a3, b2, b3).
    runs = [range(start, start + run) for start in range(0, 4, run)]
    order = [which * lanes + lane for run_lanes in runs for which in (0, 1) for lane in run_lanes]
    halves = [[base + lane for base in range(0, lanes, 4) for lane in part] for part in (order[:4], order[4:])]
    return T.Shuffle([a, b], halves[0]) + T.Shuffle([a, b], halves[1])


def fold_fours(load: Load, lanes: int) -> Expr:
    """Return a vector of four: the lanes that are equal modulo four, added in ascending order."""
    sums = load(0, 4)
    for offset in range(4, lanes, 4):
        sums = sums + load(offset, 4)
    return sums


@inlined
def interleave_fours(four, lanes, pairs, fours):
    """Interleave four int32 vectors to fours int32 [lanes], whose `fold_fours` is their four sums."""
    # Integer sums are exact, so this order need not be that of `add_lanes`.
    pairs[vector(0, lanes)] = interleave_add(four[0], four[1], lanes, 1)
    pairs[vector(1, lanes)] = interleave_add(four[2], four[3], lanes, 1)
    # Lane i of every four lanes is a part of vector i's sum.
    fours[vector(0, lanes)] = interleave_add(pairs[vector(0, lanes)], pairs[vector(1, lanes)], lanes, 2)


PREFETCH_BYTES = 1 << 15
"""The prefetch distance of rows that are read in parallel, keys and values among them. The second-level cache keeps
more misses outstanding than the first."""

NEAR_BYTES = 1 << 9
"""The prefetch distance of a single stream. Measured: 256 to 1024 bytes are alike, more than a page is slower."""

LINE = 64
"""Bytes of a cache line."""


def prefetch_distance(rows: int, row_bytes: int) -> tuple[int, int]:
    """Return how far ahead to prefetch while `rows` weight rows are read in parallel, in weight rows and in bytes."""
    # A single stream is prefetched along its row, and parallel streams are prefetched in later rows.
    # These are the rows of the next tile at least, or as many as PREFETCH_BYTES hold.
    return (0, NEAR_BYTES) if rows == 1 else (max(rows, -(-PREFETCH_BYTES // row_bytes)), 0)


def prefetch(element: Expr) -> Expr:
    """Return the prefetch of the line that holds a buffer's element, into the second-level cache.

    The element may lie past the buffer's end.
    """
    # 0 is a read, 2 the locality of the second-level cache (prefetcht1 on x86), 1 the data cache.
    # A prefetch is a hint: an address that is not mapped raises no fault.
    return T.call_intrin("void", "tirx.prefetch", T.address_of(element), 0, 2, 1)
