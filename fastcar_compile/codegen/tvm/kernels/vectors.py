"""Vector building blocks: loads, casts, sums across lanes, the arithmetic fence, prefetches.

Temporaries of a kernel are buffers without a scope and below 1024 bytes. TVM puts only those on the stack, and LLVM
keeps them in registers. A vector that is used twice goes through such a buffer, because a TIR expression is a tree.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.ir.ops.operator import FLOAT16_MAX

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


ROUNDED = 0x4B400000
"""The bits of 1.5 * 2^23, the last of which is worth 1."""


def rounded(values: Expr, lanes: int) -> Expr:
    """Return float32 below 2^22 in magnitude, rounded half to even, plus ROUNDED, as int32."""
    return T.reinterpret(vector_type("int32", lanes), values + broadcast(T.float32(1.5 * 2**23), lanes))


def nearest(values: Expr, lanes: int) -> Expr:
    """Return float32 below 2^22 in magnitude, rounded half to even, as int32.

    It takes half the instructions of `T.nearbyint` and a cast. LLVM may contract a product with this sum: that of a
    power of two is exact.
    """
    return rounded(values, lanes) - broadcast(T.int32(ROUNDED), lanes)


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


def interleave(a: Expr, b: Expr, lanes: int, run: int, half: int) -> Expr:
    """Return, for every block of four lanes, runs of `run` lanes of one half of a and b in turn."""
    # Runs of one: a0, b0, a1, b1 or a2, b2, a3, b3 of every block of four lanes.
    # Runs of two: a0, a1, b0, b1 or a2, a3, b2, b3.
    runs = [range(start, start + run) for start in range(2 * half, 2 * half + 2, run)]
    order = [which * lanes + lane for run_lanes in runs for which in (0, 1) for lane in run_lanes]
    return T.Shuffle([a, b], [base + lane for base in range(0, lanes, 4) for lane in order])


def interleave_add(a: Expr, b: Expr, lanes: int, run: int) -> Expr:
    """Return the sum of both halves of `interleave`.

    `interleave_fours` takes three of them for the sums of four vectors: a third of the cost of four `reduce_add`.
    """
    return interleave(a, b, lanes, run, 0) + interleave(a, b, lanes, run, 1)


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

NEAR_BYTES = 1 << 12
"""The prefetch distance of a single stream: a page. Measured: on Zen 4 256 to 1024 bytes are alike, and more than a
page is slower; on Sapphire Rapids, whose last-level cache answers later, less than a page is slower."""

LINE = 64
"""Bytes of a cache line."""


def prefetch_distance(rows: int, row_bytes: int) -> tuple[int, int]:
    """Return how far ahead to prefetch while `rows` weight rows are read in parallel, in weight rows and in bytes."""
    # A single stream is prefetched along its row, and parallel streams are prefetched in later rows.
    # These are the rows of the next tile at least, or as many as PREFETCH_BYTES hold.
    return (0, NEAR_BYTES) if rows == 1 else (max(rows, -(-PREFETCH_BYTES // row_bytes)), 0)


def prefetch(element: Expr, level: int = 2) -> Expr:
    """Return the prefetch of the line that holds a buffer's element, into the cache of that level: 1 or 2.

    The element may lie past the buffer's end.
    """
    # 0 is a read; 4 - level the locality, of which 2 is prefetcht1 on x86; 1 the data cache.
    # A prefetch is a hint: an address that is not mapped raises no fault.
    return T.call_intrin("void", "tirx.prefetch", T.address_of(element), 0, 4 - level, 1)


# Functions in float32 as plain arithmetic, which LLVM vectorises. libm would take one call per element.


_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts. The product of the first with an integer of 8 bits is exact (Cody and Waite)."""

_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Cephes `expf`: (exp(r) - 1 - r) / r^2 for |r| <= ln 2 / 2, highest power first."""

_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
"""Cephes `tanhf`: (tanh(x) / x - 1) / x^2 for |x| < 0.625, highest power of x^2 first."""

_SERIES_UP_TO = 0.625

_SMALLEST = -87.0
"""exp(-87) = 1.6e-38 is the least normal result. Smaller arguments give it too."""

_ERF_ABOVE = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_ERF_BELOW = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03),
    *(-7.37332916720468e-03, -1.42647390514189e-02),
)
"""Eigen's `erf`: numerator and denominator of erf(x) / x for |x| <= 4, highest power of x^2 first."""


def exp_not_positive(x: Any, lanes: int = 1) -> Any:
    """Return exp(x) of float32 x <= 0, within 2 units in the last place. Below -87 it stays at exp(-87).

    T.max gives its second operand where one is NaN: in this order a NaN stays a NaN.
    """
    bounded = T.max(broadcast(T.float32(_SMALLEST), lanes), x)
    # exp(x) = 2^power * exp(r), with |r| at most ln 2 / 2.
    power = T.nearbyint(bounded * T.float32(_LOG2_E))
    # The first product is exact. The second one adds the bits of ln 2 that its first part lacks.
    r = bounded - power * T.float32(_LN2_HIGH) - power * T.float32(_LN2_LOW)
    fraction = _series(_COEFFICIENTS, r) * r * r + r + T.float32(1)
    # power is from -126 to 0, so the exponent field is at least 1: the result is never subnormal.
    # A NaN makes the fraction NaN, whatever its power is.
    exponent = T.shift_left(cast("int32", power, lanes) + 127, broadcast(T.int32(23), lanes))
    return fraction * T.reinterpret(vector_type("float32", lanes), exponent)


def tanh(x: Any) -> Any:
    """Return tanh(x) of float32 x, within 2 units in the last place; a NaN stays a NaN."""
    squared = x * x
    size = T.max(x, -x)
    # tanh |x| = (1 - e) / (1 + e) with e = exp(-2 |x|), an argument that is never positive.
    decay = exp_not_positive(T.float32(-2) * size)
    large = (T.float32(1) - decay) / (T.float32(1) + decay)
    # For small x the difference 1 - e would cancel, so a series takes over.
    small = _series(_TANH, squared) * squared * x + x
    return T.Select(size < T.float32(_SERIES_UP_TO), small, T.Select(x < 0, -large, large))


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) of float32 x, within 4 units in the last place; at least exp(-87). A NaN stays a NaN."""
    # exp(-|x|) cannot overflow. For a negative x the numerator is exp(x) itself.
    decay = exp_not_positive(T.min(x, -x))
    return T.Select(x < 0, decay, T.float32(1)) / (T.float32(1) + decay)


def erf(x: Any) -> Any:
    """Return erf(x) of float32 x, within 4e-7; a NaN stays a NaN."""
    # From 4 on erf rounds to 1, and the rational function holds only up to there.
    # x is the second operand of both, so that a NaN passes.
    bounded = T.max(T.float32(-4), T.min(T.float32(4), x))
    squared = bounded * bounded
    return bounded * _series(_ERF_ABOVE, squared) / _series(_ERF_BELOW, squared)


def silu(x: Any) -> Any:
    """Return x * sigmoid(x) of float32 x."""
    return x * sigmoid(x)


def gelu(x: Any) -> Any:
    """Return x * (1 + erf(x / sqrt 2)) / 2 of float32 x (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return x * T.float32(0.5) * (erf(x * T.float32(math.sqrt(0.5))) + T.float32(1))


def gelu_tanh(x: Any) -> Any:
    """Return the approximation of `gelu` by tanh, from the same source."""
    inner = (x * x * x * T.float32(0.044715) + x) * T.float32(math.sqrt(2 / math.pi))
    return x * T.float32(0.5) * (tanh(inner) + T.float32(1))


def _series(coefficients: Sequence[float], x: Any) -> Any:
    """Return the polynomial by Horner's rule, highest power first."""
    total = T.float32(coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + T.float32(coefficient)
    return total


# Weights and cached elements to float32, and float32 to cached elements.
#
# An instruction set that cannot convert float16 takes integer arithmetic: LLVM would call `__extendhfsf2` and
# `__truncsfhf2`, which take one element at a time. Values are scalars, in a vectorised loop too.


_SIGN, _MAGNITUDE, _INFINITY = 0x8000, 0x7FFF, 0x7C00
_NAN, _BFLOAT16_NAN = 0x7E00, 0x7FC0
_MANTISSA_SHIFT = 23 - 10
_SIGN_SHIFT = 31 - 15
_BIAS = 127 - 15
_FLOAT32_INFINITY = 0xFF << 23
_LEAST_NORMAL = (_BIAS + 1) << 23
"""Bits of 2^-14 in float32."""


def to_float32(value: Any, dtype: str, isa: InstructionSet) -> Any:
    """Return a loaded element of `dtype` as float32, exactly: subnormals, infinities and NaN too."""
    if dtype == "float32":
        return value
    if dtype == "float16" and isa.float16:
        return T.Cast("float32", value)
    bits = T.Cast("uint32", T.reinterpret("uint16", value))
    if dtype == "bfloat16":
        # The bits of a bfloat16 are the upper half of those of the same float32.
        return T.reinterpret("float32", T.shift_left(bits, T.uint32(16)))
    magnitude = T.bitwise_and(bits, T.uint32(_MAGNITUDE))
    # The product with a power of two moves the exponent, and makes a subnormal float16 a normal float32.
    number = T.reinterpret("float32", T.shift_left(magnitude, T.uint32(_MANTISSA_SHIFT))) * T.float32(2.0**_BIAS)
    # An exponent field of 31 has become 31 + 112. Or-ing 255 over it makes it that of infinity and NaN.
    # The mantissa stays, so a NaN keeps its payload.
    special = T.Select(magnitude >= T.uint32(_INFINITY), T.uint32(_FLOAT32_INFINITY), T.uint32(0))
    sign = T.shift_left(T.bitwise_and(bits, T.uint32(_SIGN)), T.uint32(_SIGN_SHIFT))
    return T.reinterpret("float32", T.bitwise_or(T.bitwise_or(T.reinterpret("uint32", number), special), sign))


def from_float32(value: Any, dtype: str, isa: InstructionSet) -> Any:
    """Return a float32 as an element of `dtype`, rounded as `ir.ops.operator.stored` does."""
    if dtype == "float32":
        return value
    if dtype == "bfloat16":
        return _to_bfloat16(T.reinterpret("uint32", value))
    # T.min and T.max give their second operand where one is NaN.
    bounded = T.max(T.float32(-FLOAT16_MAX), T.min(T.float32(FLOAT16_MAX), value))
    if isa.float16:
        return T.Cast("float16", bounded)
    bits = T.reinterpret("uint32", bounded)
    magnitude = T.bitwise_and(bits, T.uint32(0x7FFFFFFF))
    normal = _half_to_even(magnitude, _MANTISSA_SHIFT, _BIAS)
    # The last place of 0.5 + x is 2^-24, as of a subnormal float16. So the sum's own rounding is the right one.
    sum_ = T.reinterpret("float32", magnitude) + T.float32(0.5)
    subnormal = T.bitwise_and(T.reinterpret("uint32", sum_), T.uint32(_MAGNITUDE))
    rounded = T.Select(magnitude < T.uint32(_LEAST_NORMAL), subnormal, normal)
    # Infinities were limited above, so only a NaN is larger than infinity's bits.
    number = T.Select(magnitude > T.uint32(_FLOAT32_INFINITY), T.uint32(_NAN), rounded)
    sign = T.bitwise_and(T.shift_right(bits, T.uint32(_SIGN_SHIFT)), T.uint32(_SIGN))
    return T.reinterpret("float16", T.Cast("uint16", T.bitwise_or(number, sign)))


def _to_bfloat16(bits: Any) -> Any:
    # A carry of a magnitude ends at infinity. Only that of a NaN could reach the sign, so a NaN gets its bits.
    known = T.bitwise_and(bits, T.uint32(0x7FFFFFFF)) <= T.uint32(_FLOAT32_INFINITY)
    number = T.Select(known, _half_to_even(bits, 16, 0), T.uint32(_BFLOAT16_NAN))
    return T.reinterpret("bfloat16", T.Cast("uint16", number))


def _half_to_even(bits: Any, shift: int, rebias: int) -> Any:
    """Return a float32's bits rounded to `shift` fewer bits, with `rebias` taken from the exponent."""
    odd = T.bitwise_and(T.shift_right(bits, T.uint32(shift)), T.uint32(1))
    # Half to even in integers: half a last place less one, plus the last kept bit.
    # A carry runs from the mantissa into the exponent, as it must.
    half_less = (1 << (shift - 1)) - 1
    # One addition changes the bias and rounds. It is modulo 2^32, because the change of the bias is negative.
    return T.shift_right(bits + T.uint32((half_less - (rebias << 23)) % (1 << 32)) + odd, T.uint32(shift))
