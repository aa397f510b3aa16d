"""Dot products along the reduction as data: how an instruction set multiplies int8, or int4, weights by int8 inputs.

Lane widths and saturation are those of Intel's Intrinsics Guide and of Arm's Neon Intrinsics Reference.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import Int8
from fastcar_compile.codegen.tvm.kernels import vectors
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, Load, intrinsic, vpdpbusd
from fastcar_compile.ir.ops.linear import GROUP

HALF = GROUP // 2
"""Bytes of a group of int4. Byte i holds input i in its low and input 64 + i in its high nibble."""

Step = Callable[[Expr, Load, Load], Expr]


@dataclass(frozen=True)
class Dot:
    """How a kernel adds up products of integers.

    Args:
        width: products of one step: of int4 those of a group.
        lanes: int32 sums that a step adds to.
        unsigned: 128, or 8, is added to every weight. A step over zero weights gives the zero-point correction.
        step: (sums, weights, activations) -> sums, which together have grown by sum_i w[i] * q[i], i < width.
        accumulators: vectors of sums that fit the registers; of int8. columns: activation rows of a tile at most.
        streams: weight rows that are read in parallel for few activation rows, of int8. One where that was measured to
            be faster, several where they share a load of activations.
    """

    width: int
    lanes: int
    unsigned: bool
    step: Step
    accumulators: int = 0
    columns: int = 0
    streams: int = 0
    moved: str = "int8"


def _vpdpbusd(width: int) -> Step:
    # Weights plus 128 are the unsigned factor, so the correction is one number per row of x.
    return lambda acc, w, q: vpdpbusd(acc, vectors.flip_sign(w(0, width), width), q(0, width), width)


def _vpmaddubsw(acc: Expr, w: Load, q: Load) -> Expr:
    """Move the weights' signs to the activations, -127 to 127: two products are at most 2 * 128 * 127 < 2**15."""
    signed = intrinsic("int8x32", "llvm.x86.avx2.psign.b", q(0, 32), w(0, 32))
    size = intrinsic("int8x32", "llvm.abs.v32i8", w(0, 32), T.bool(False))
    pairs = intrinsic("int16x16", "llvm.x86.avx2.pmadd.ub.sw", size, signed)
    # vpmaddwd with ones adds neighbours to 8 int32.
    return acc + intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, T.Broadcast(T.int16(1), 16))


def _smull(acc: Expr, w: Load, q: Load) -> Expr:
    """Add two products in int16: 2 * 127 * 128 < 2**15."""
    # Eight products per half. saddlp adds neighbours and widens the sums to int32.
    low, high = (intrinsic("int16x8", "llvm.aarch64.neon.smull.v8i16", w(o, 8), q(o, 8)) for o in (0, 8))
    return acc + intrinsic("int32x4", "llvm.aarch64.neon.saddlp.v4i32.v8i16", low + high)


def _sdot(acc: Expr, w: Load, q: Load) -> Expr:
    # Both factors are signed, so no zero-point correction is needed.
    return intrinsic("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, w(0, 16), q(0, 16))


def _wasm_dot(acc: Expr, w: Load, q: Load) -> Expr:
    for offset in (0, 8):
        acc = acc + intrinsic("int32x4", "llvm.wasm.dot", *(T.Cast("int16x8", x(offset, 8)) for x in (w, q)))
    return acc


def _portable(acc: Expr, w: Load, q: Load) -> Expr:
    """Add two products in int16, as for smull."""
    low, high = (T.Cast("int16x8", w(o, 8)) * T.Cast("int16x8", q(o, 8)) for o in (0, 8))
    return acc + T.Cast("int32x8", low + high)


def nibbles(w: Load, offset: int, width: int) -> tuple[Expr, Expr]:
    """Return low and high nibbles of `width` bytes, plus 8: of two's complement that is the sign bit inverted."""
    mask, sign, four = (T.Broadcast(T.uint8(number), width) for number in (15, 8, 4))
    both = w(offset, width)
    if width == 64:
        # An and with an exclusive or behind it are one instruction of AVX-512, vpternlogd.
        low, high = (T.bitwise_xor(T.bitwise_and(value, mask), sign) for value in (both, T.shift_right(both, four)))
    else:
        both = T.bitwise_xor(both, T.Broadcast(T.uint8(0x88), width))
        low, high = (T.bitwise_and(value, mask) for value in (both, T.shift_right(both, four)))
    return T.reinterpret(f"int8x{width}", low), T.reinterpret(f"int8x{width}", high)


def signed_nibbles(w: Load, offset: int, width: int) -> tuple[Expr, Expr]:
    """Return low and high nibbles, sign-extended."""
    # The shift to the right is arithmetic: it extends the sign of the nibble that is on top.
    four = T.Broadcast(T.int8(4), width)
    low = T.reinterpret(f"int8x{width}", T.shift_left(w(offset, width), T.Broadcast(T.uint8(4), width)))
    return T.shift_right(low, four), T.shift_right(T.reinterpret(f"int8x{width}", w(offset, width)), four)


def _pairs(w: Load, q: Load, width: int) -> Iterator[tuple[Expr, Expr]]:
    """Yield signed nibbles and the activations that they meet: low ones the first 64 inputs, high ones the last 64."""
    for offset in range(0, HALF, width):
        low, high = signed_nibbles(w, offset, width)
        yield low, q(offset, width)
        yield high, q(HALF + offset, width)


def _vpdpbusd_int4(width: int) -> Step:
    def step(acc: Expr, w: Load, q: Load) -> Expr:
        # acc is one register. Low nibbles meet the first 64 inputs, high nibbles the last 64.
        for offset in range(0, HALF, width):
            low, high = nibbles(w, offset, width)
            acc = vpdpbusd(acc, low, q(offset, width), width)
            acc = vpdpbusd(acc, high, q(HALF + offset, width), width)
        return acc

    return step


def _vpmaddubsw_int4(acc: Expr, w: Load, q: Load) -> Expr:
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
    return acc + intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, T.Broadcast(T.int16(1), 16))


def _sdot_int4(acc: Expr, w: Load, q: Load) -> Expr:
    for pair in _pairs(w, q, 16):
        acc = intrinsic("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, *pair)
    return acc


def _smull_int4(acc: Expr, w: Load, q: Load) -> Expr:
    """Add 16 products of at most 8 * 127 in each int16 lane."""
    products = [intrinsic("int16x8", "llvm.aarch64.neon.smull.v8i16", *pair) for pair in _pairs(w, q, 8)]
    # saddlp adds neighbours and widens the sums to int32.
    return acc + intrinsic("int32x4", "llvm.aarch64.neon.saddlp.v4i32.v8i16", sum(products[1:], products[0]))


def _wasm_dot_int4(acc: Expr, w: Load, q: Load) -> Expr:
    """Add 16 products in each int16 lane, as for smull; the dot product with ones adds neighbours."""
    products = [T.Cast("int16x8", a) * T.Cast("int16x8", b) for a, b in _pairs(w, q, 8)]
    return acc + intrinsic("int32x4", "llvm.wasm.dot", sum(products[1:], products[0]), T.Broadcast(T.int16(1), 8))


def _portable_int4(acc: Expr, w: Load, q: Load) -> Expr:
    """Add 16 products in each int16 lane, as for smull."""
    products = [T.Cast("int16x8", a) * T.Cast("int16x8", b) for a, b in _pairs(w, q, 8)]
    # 16 * 8 * 127 is below 2^15, so the int16 sums are exact before they are widened.
    return acc + T.Cast("int32x8", sum(products[1:], products[0]))


DOTS: dict[Literal["int8", "int4"], dict[Int8, Dot]] = {
    "int8": {
        **dict.fromkeys(("vnni512", "amx"), Dot(64, 16, True, _vpdpbusd(64), 24, 6, 1)),
        "vnni256": Dot(32, 8, True, _vpdpbusd(32), 8, 2, 1),
        "madd": Dot(32, 8, False, _vpmaddubsw, 8, 2, 8),
        "smmla": Dot(16, 4, False, _sdot, 12, 3, 8),
        "sdot": Dot(16, 4, False, _sdot, 12, 3, 8),
        "smull": Dot(16, 4, False, _smull, 8, 2, 8),
        "dot": Dot(16, 4, False, _wasm_dot, 8, 4, 8, "int16"),
        "portable": Dot(16, 8, False, _portable, 4, 2, 8),
    },
    "int4": {
        **dict.fromkeys(("vnni512", "amx"), Dot(GROUP, 16, True, _vpdpbusd_int4(64))),
        "vnni256": Dot(GROUP, 8, True, _vpdpbusd_int4(32)),
        "madd": Dot(GROUP, 8, True, _vpmaddubsw_int4),
        "smmla": Dot(GROUP, 4, False, _sdot_int4),
        "sdot": Dot(GROUP, 4, False, _sdot_int4),
        "smull": Dot(GROUP, 4, False, _smull_int4),
        "dot": Dot(GROUP, 4, False, _wasm_dot_int4),
        "portable": Dot(GROUP, 8, False, _portable_int4),
    },
}
"""By the type of weights and the instruction set."""
