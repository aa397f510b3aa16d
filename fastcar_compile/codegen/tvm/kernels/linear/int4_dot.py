"""Sums of one group of 128 int4 weights times int8 activations, for every instruction set, exact in int32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import Int8
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, Load, intrinsic, vpdpbusd
from fastcar_compile.ops.quant import GROUP

HALF = GROUP // 2
"""Bytes of a group. Byte i holds input i in its low and input 64 + i in its high nibble."""


@dataclass(frozen=True)
class Int4Dot:
    """How a kernel adds up a group.

    Args:
        lanes: int32 sums of a group.
        unsigned: 8 is added to every weight. A group of zero weights gives the zero-point correction.
        streams: as in `Int8Dot`, for rows that fit a page.
        group: (64 bytes of weights, 128 activations) -> sums.
    """

    lanes: int
    unsigned: bool
    streams: int
    group: Callable[[Load, Load], Expr]


def nibbles(w: Load, offset: int, width: int) -> tuple[Expr, Expr]:
    """Return low and high nibbles of `width` bytes, plus 8: of two's complement that is the sign bit inverted."""
    flipped = T.bitwise_xor(w(offset, width), T.Broadcast(T.uint8(0x88), width))
    mask = T.Broadcast(T.uint8(15), width)
    low = T.bitwise_and(flipped, mask)
    high = T.bitwise_and(T.shift_right(flipped, T.Broadcast(T.uint8(4), width)), mask)
    return T.reinterpret(f"int8x{width}", low), T.reinterpret(f"int8x{width}", high)


def _signed(w: Load, offset: int, width: int) -> tuple[Expr, Expr]:
    """Return low and high nibbles, sign-extended."""
    # The shift to the right is arithmetic: it extends the sign of the nibble that is on top.
    four = T.Broadcast(T.int8(4), width)
    low = T.reinterpret(f"int8x{width}", T.shift_left(w(offset, width), T.Broadcast(T.uint8(4), width)))
    return T.shift_right(low, four), T.shift_right(T.reinterpret(f"int8x{width}", w(offset, width)), four)


def _vpdpbusd(width: int) -> Callable[[Load, Load], Expr]:
    def group(w: Load, q: Load) -> Expr:
        acc = T.Broadcast(T.int32(0), width // 4)
        # acc is one register. Low nibbles meet the first 64 inputs, high nibbles the last 64.
        for offset in range(0, HALF, width):
            low, high = nibbles(w, offset, width)
            acc = vpdpbusd(acc, low, q(offset, width), width)
            acc = vpdpbusd(acc, high, q(HALF + offset, width), width)
        return acc

    return group


def _vpmaddubsw(w: Load, q: Load) -> Expr:
    """Add four results in int16. vpmaddubsw saturates there, which 4 * 2 * 15 * 127 does not reach."""
    parts = []
    # Unsigned nibbles times signed bytes, two products per int16 lane.
    for offset in (0, 32):
        low, high = nibbles(w, offset, 32)
        parts += [(low, q(offset, 32)), (high, q(HALF + offset, 32))]
    products = [intrinsic("int16x16", "llvm.x86.avx2.pmadd.ub.sw", *part) for part in parts]
    # The four results are added in int16, so one widening serves all of them.
    pairs = (products[0] + products[1]) + (products[2] + products[3])
    # vpmaddwd with ones adds neighbours into int32.
    return intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, T.Broadcast(T.int16(1), 16))


def _sdot(w: Load, q: Load) -> Expr:
    # Both factors of sdot are signed, so no zero-point correction is needed.
    acc = T.Broadcast(T.int32(0), 4)
    for offset in range(0, HALF, 16):
        for nibbles, start in zip(_signed(w, offset, 16), (offset, HALF + offset), strict=True):
            acc = intrinsic("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, nibbles, q(start, 16))
    return acc


def _smull(w: Load, q: Load) -> Expr:
    """Add 16 products of at most 8 * 127 in each int16 lane."""
    products = []
    for offset in range(0, HALF, 8):
        for nibbles, start in zip(_signed(w, offset, 8), (offset, HALF + offset), strict=True):
            products.append(intrinsic("int16x8", "llvm.aarch64.neon.smull.v8i16", nibbles, q(start, 8)))
    # saddlp adds neighbours and widens the sums to int32.
    return intrinsic("int32x4", "llvm.aarch64.neon.saddlp.v4i32.v8i16", sum(products[1:], products[0]))


def _portable(w: Load, q: Load) -> Expr:
    """Add 16 products in each int16 lane, as for smull."""
    products = []
    for offset in range(0, HALF, 8):
        for nibbles, start in zip(_signed(w, offset, 8), (offset, HALF + offset), strict=True):
            products.append(T.Cast("int16x8", nibbles) * T.Cast("int16x8", q(start, 8)))
    # 16 * 8 * 127 is below 2^15, so the int16 sums are exact before they are widened.
    return T.Cast("int32x8", sum(products[1:], products[0]))


INT4_DOTS: dict[Int8, Int4Dot] = {
    "vnni512": Int4Dot(16, True, 1, _vpdpbusd(64)),
    "vnni256": Int4Dot(8, True, 1, _vpdpbusd(32)),
    "madd": Int4Dot(8, True, 8, _vpmaddubsw),
    "sdot": Int4Dot(4, False, 8, _sdot),
    "smull": Int4Dot(4, False, 8, _smull),
    "portable": Int4Dot(8, False, 8, _portable),
}
