"""Sums of int8 products for every instruction set, exact in int32.

Lane widths and saturation are those of Intel's Intrinsics Guide and of Arm's Neon Intrinsics Reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import Int8
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, Load, flip_sign, intrinsic, vpdpbusd


@dataclass(frozen=True)
class Int8Dot:
    """How a kernel adds up int8 products.

    Args:
        width: products of one step.
        lanes: int32 sums that a step adds to.
        unsigned: 128 is added to every weight. A step over zero weights gives the zero-point correction.
        accumulators: vectors of sums that fit the registers.
        streams: weight rows that are read in parallel for few activation rows. One where that was measured to be
            faster, several where they share a load of activations.
        step: (sums, weights, activations) -> sums.
    """

    width: int
    lanes: int
    unsigned: bool
    accumulators: int
    streams: int
    step: Callable[[Expr, Load, Load], Expr]


def _vpdpbusd(width: int) -> Callable[[Expr, Load, Load], Expr]:
    # Weights plus 128 are the unsigned factor, so the correction is one number per row of x.
    return lambda acc, w, q: vpdpbusd(acc, flip_sign(w(0, width), width), q(0, width), width)


def _vpmaddwd(acc: Expr, w: Load, q: Load) -> Expr:
    """Widen first: vpmaddubsw would saturate, because 2 * 127 * 255 is beyond int16."""
    # 16 bytes become 16 int16. vpmaddwd adds neighbouring products to 8 int32.
    wide = (T.Cast("int16x16", v(0, 16)) for v in (w, q))
    return acc + intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", *wide)


def _smull(acc: Expr, w: Load, q: Load) -> Expr:
    """Add two products in int16: 2 * 127 * 128 < 2**15."""
    # Eight products per half. saddlp adds neighbours and widens the sums to int32.
    low, high = (intrinsic("int16x8", "llvm.aarch64.neon.smull.v8i16", w(o, 8), q(o, 8)) for o in (0, 8))
    return acc + intrinsic("int32x4", "llvm.aarch64.neon.saddlp.v4i32.v8i16", low + high)


def _sdot(acc: Expr, w: Load, q: Load) -> Expr:
    # Both factors are signed, so no zero-point correction is needed.
    return intrinsic("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, w(0, 16), q(0, 16))


def _portable(acc: Expr, w: Load, q: Load) -> Expr:
    """Add two products in int16, as for smull."""
    low, high = (T.Cast("int16x8", w(o, 8)) * T.Cast("int16x8", q(o, 8)) for o in (0, 8))
    return acc + T.Cast("int32x8", low + high)


INT8_DOTS: dict[Int8, Int8Dot] = {
    "vnni512": Int8Dot(64, 16, True, 12, 1, _vpdpbusd(64)),
    "vnni256": Int8Dot(32, 8, True, 8, 1, _vpdpbusd(32)),
    "madd": Int8Dot(16, 8, False, 8, 8, _vpmaddwd),
    "sdot": Int8Dot(16, 4, False, 12, 8, _sdot),
    "smull": Int8Dot(16, 4, False, 8, 8, _smull),
    "portable": Int8Dot(16, 8, False, 4, 8, _portable),
}
