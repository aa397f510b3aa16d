"""float16 of a cache to float32 and back.

An instruction set without conversions takes integer arithmetic: LLVM would call `__extendhfsf2` and `__truncsfhf2`,
which take one element at a time. Values are scalars, in a vectorised loop too.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.ops.cached import FLOAT16_MAX

_SIGN, _MAGNITUDE, _INFINITY = 0x8000, 0x7FFF, 0x7C00
_NAN = 0x7E00
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
    if isa.float16:
        return T.Cast("float32", value)
    bits = T.Cast("uint32", T.reinterpret("uint16", value))
    magnitude = T.bitwise_and(bits, T.uint32(_MAGNITUDE))
    # The product with a power of two moves the exponent, and makes a subnormal float16 a normal float32.
    number = T.reinterpret("float32", T.shift_left(magnitude, T.uint32(_MANTISSA_SHIFT))) * T.float32(2.0**_BIAS)
    # An exponent field of 31 has become 31 + 112. Or-ing 255 over it makes it that of infinity and NaN.
    # The mantissa stays, so a NaN keeps its payload.
    special = T.Select(magnitude >= T.uint32(_INFINITY), T.uint32(_FLOAT32_INFINITY), T.uint32(0))
    sign = T.shift_left(T.bitwise_and(bits, T.uint32(_SIGN)), T.uint32(_SIGN_SHIFT))
    return T.reinterpret("float32", T.bitwise_or(T.bitwise_or(T.reinterpret("uint32", number), special), sign))


def from_float32(value: Any, dtype: str, isa: InstructionSet) -> Any:
    """Return a float32 as an element of `dtype`, rounded as `ops.cached.stored` does."""
    if dtype == "float32":
        return value
    # T.min and T.max give their second operand where one is NaN.
    bounded = T.max(T.float32(-FLOAT16_MAX), T.min(T.float32(FLOAT16_MAX), value))
    if isa.float16:
        return T.Cast("float16", bounded)
    bits = T.reinterpret("uint32", bounded)
    magnitude = T.bitwise_and(bits, T.uint32(0x7FFFFFFF))
    odd = T.bitwise_and(T.shift_right(magnitude, T.uint32(_MANTISSA_SHIFT)), T.uint32(1))
    # Half to even in integers: half a last place less one, plus the last kept bit.
    # A carry runs from the mantissa into the exponent, as it must.
    half_less = (1 << (_MANTISSA_SHIFT - 1)) - 1
    # One addition changes the bias and rounds. It is modulo 2^32, because the change of the bias is negative.
    rebias = T.uint32((half_less - (_BIAS << 23)) % (1 << 32))
    normal = T.shift_right(magnitude + rebias + odd, T.uint32(_MANTISSA_SHIFT))
    # The last place of 0.5 + x is 2^-24, as of a subnormal float16. So the sum's own rounding is the right one.
    sum_ = T.reinterpret("float32", magnitude) + T.float32(0.5)
    subnormal = T.bitwise_and(T.reinterpret("uint32", sum_), T.uint32(_MAGNITUDE))
    rounded = T.Select(magnitude < T.uint32(_LEAST_NORMAL), subnormal, normal)
    # Infinities were limited above, so only a NaN is larger than infinity's bits.
    number = T.Select(magnitude > T.uint32(_FLOAT32_INFINITY), T.uint32(_NAN), rounded)
    sign = T.bitwise_and(T.shift_right(bits, T.uint32(_SIGN_SHIFT)), T.uint32(_SIGN))
    return T.reinterpret("float16", T.Cast("uint16", T.bitwise_or(number, sign)))
