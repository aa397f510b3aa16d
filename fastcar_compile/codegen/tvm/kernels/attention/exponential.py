"""exp in float32 as plain arithmetic, which LLVM vectorises. libm would take one call per element."""

from __future__ import annotations

from dataclasses import dataclass
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


def exp_not_positive(x: Any, lanes: int = 1) -> Any:
    """Return exp(x) of float32 x <= 0, within 2 units in the last place. Below -87 it stays at exp(-87).

    T.max gives its second operand where one is NaN: in this order a NaN stays a NaN.
    """
    bounded = T.max(broadcast(T.float32(_SMALLEST), lanes), x)
    power = T.nearbyint(bounded * T.float32(_LOG2_E))
    r = bounded - power * T.float32(_LN2_HIGH) - power * T.float32(_LN2_LOW)
    series = T.float32(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        series = series * r + T.float32(coefficient)
    fraction = series * r * r + r + T.float32(1)
    exponent = T.shift_left(cast("int32", power, lanes) + 127, broadcast(T.int32(23), lanes))
    return fraction * T.reinterpret(vector_type("float32", lanes), exponent)


def tanh(x: Any) -> Any:
    """Return tanh(x) of float32 x, within 2 units in the last place; a NaN stays a NaN."""
    squared = x * x
    series = T.float32(_TANH[0])
    for coefficient in _TANH[1:]:
        series = series * squared + T.float32(coefficient)
    size = T.max(x, -x)
    decay = exp_not_positive(T.float32(-2) * size)
    large = (T.float32(1) - decay) / (T.float32(1) + decay)
    return T.Select(size < T.float32(_SERIES_UP_TO), series * squared * x + x, T.Select(x < 0, -large, large))


@dataclass(frozen=True)
class LogitRule:
    """What a product of query and key becomes: times `scale`, and limited softly to `softcap` where there is one."""

    scale: float
    softcap: float | None = None

    def logit(self, product: Any) -> Any:
        """Return the logit of a product."""
        return self.capped(product * T.float32(self.scale))

    def capped(self, scaled: Any) -> Any:
        """Return softcap * tanh(scaled / softcap); without a soft-cap what is scaled."""
        if self.softcap is None:
            return scaled
        return T.float32(self.softcap) * tanh(scaled * T.float32(1 / self.softcap))
