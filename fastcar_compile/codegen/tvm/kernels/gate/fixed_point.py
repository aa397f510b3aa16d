"""Fixed point of the scores: float64 to integers on vectors of every instruction set."""

from __future__ import annotations

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, broadcast, cast, vector_type
from fastcar_compile.drs.score import TAS_FRACTION_BITS, TAS_LIMIT

ROUNDER = 1.5 * 2.0**52
"""A float64 of at most 2^51 plus this has the nearest integer, half to even, in its low bits. AVX2 has no conversion of
float64 to int64, and this takes one addition where there is one too."""

ROUNDER_BITS = 0x4338000000000000
"""The bits of ROUNDER."""

NOT_A_NUMBER = 0x7FC00000
"""The bits of the NaN that a row has which is not finite."""

INFINITY = 0x7F800000
"""The bits of infinity: magnitude bits from here on are not finite."""


def rounded(x: Expr, lanes: int) -> Expr:
    """Return float64 of magnitude at most 2^51 as int64, rounded half to even."""
    # From 2^52 to 2^53 the last place of a float64 is 1, so the addition itself rounds to an integer.
    # The factor 1.5 keeps the sum in that range for a negative x too.
    bits = T.reinterpret(vector_type("int64", lanes), x + broadcast(T.float64(ROUNDER), lanes))
    return bits - broadcast(T.int64(ROUNDER_BITS), lanes)


def units(a: Expr, lanes: int) -> Expr:
    """Return float32 in units of 2^-24, exactly, as float64."""
    return cast("float64", a, lanes) * broadcast(T.float64(1 << TAS_FRACTION_BITS), lanes)


def limited(product: Expr, lanes: int) -> Expr:
    """Return a float64 in units of 2^-24 as int64, rounded half to even and limited to 2^46."""
    # 2^46 is below the 2^51 that `rounded` takes.
    # T.min gives its second operand for a NaN, so a NaN becomes the limit. The callers make such a score NaN.
    limit = broadcast(T.float64(TAS_LIMIT), lanes)
    return rounded(T.max(T.min(product, limit), -limit), lanes)


def limited_square(product: Expr, lanes: int) -> Expr:
    """Return the same of a float64 that is not negative."""
    return rounded(T.min(product, broadcast(T.float64(TAS_LIMIT), lanes)), lanes)


def fixed_magnitude(a: Expr, lanes: int) -> Expr:
    """Return a float32 that is not negative in units of 2^-24 as int64, rounded half to even and limited to 2^46."""
    # The product with 2^24 is exact. An overflow gives infinity, which the limit takes.
    own = a * broadcast(T.float32(1 << TAS_FRACTION_BITS), lanes)
    return rounded(cast("float64", T.min(own, broadcast(T.float32(TAS_LIMIT), lanes)), lanes), lanes)


def finite_or_nan(largest: Expr, score: Expr) -> Expr:
    """Return the score, or NaN where the largest magnitude bits are not finite."""
    return T.Select(largest < T.int32(INFINITY), score, T.reinterpret("float32", T.int32(NOT_A_NUMBER)))
