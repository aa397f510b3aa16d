"""Functions in float32 as plain arithmetic, which LLVM vectorises. libm would take one call per element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.simd.vectors import broadcast, cast, vector_type

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
