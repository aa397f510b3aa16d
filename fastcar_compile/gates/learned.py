"""A gate with weights of its own: a small network on the MLP's input and its change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

import fastcar_compile.gates.base as base
from fastcar_compile.errors import CompileError
from fastcar_compile.gates.scores import LEAST_EXPONENT, MANTISSA_BITS, SCALE_FIELD, TAS_FRACTION_BITS, fixed_products

if TYPE_CHECKING:
    from torch import Tensor


class LearnedGate(base.FabricGate):
    """The cost of a replay, predicted by a network with one hidden layer. `fastcar train-gate` trains it.

    The cached input is the input of the slot's last computed visit, as for `input_delta`. The score has no scale of its
    own, so that thresholds are calibrated for the weights.
    """

    name = "learned"
    comparison = base.Comparison.AT_MOST
    default_threshold = 0.0
    caches_input = True
    takes_weights = True
    one_scale = True

    def score(self, call: base.Call, values: base.GateValues[base.T]) -> base.T:
        """Return the network's output; a row replays where it is at most the threshold."""
        network = (values.params[name] for name in self.params())
        return call(base.operator("learned_score"), values.x, values.cached, *network)

    @staticmethod
    def exact_score(inputs: base.GateInputs[base.Array], constants: base.ScoreConstants) -> base.Array:
        """Return the network's output in numpy and Python's integers."""
        x, cached = base.operand(inputs.x), base.operand(inputs.cached)
        w1, b1, w2, b2 = base.operand(constants.network)
        with np.errstate(invalid="ignore", over="ignore"):
            features = np.concatenate([x, np.abs(x - cached)], -1)
        return np.array([_network(row, w1, b1, w2, b2[0]) for row in features], np.float32)

    def params(self) -> dict[str, Tensor]:
        """Return w1, b1, w2 and b2.

        Raises:
            CompileError: the gate was made without its weights.
        """
        if self.weights is None:
            raise CompileError("gate learned has no weights", hint="give gate_weights=…, or --gate-weights FILE")
        return self.weights.params()

    def describe(self) -> str:
        """Return the formula."""
        units = "" if self.weights is None else f" of {self.weights.units} units"
        return f"a trained network{units}, w2 . relu(w1 @ [x ; |x - x_cached|] + b1) + b2"


def unit_exponents(w1: base.Array) -> base.Array:
    """Return the exponent of the lowest bit that a unit's weights have, int64 [units], for float32 [units, 2 H].

    A unit of zeros has 0.
    """
    # `frexp` gives magnitudes in [0.5, 1): times 2^24 they are whole numbers, for every float32.
    mantissas, exponents = np.frexp(w1)
    whole = np.abs(mantissas.astype(np.float64) * (1 << 24)).astype(np.int64)
    # `whole & -whole` keeps the lowest set bit alone, and log2 of a power of two is exact.
    lowest = np.log2((whole & -whole).clip(min=1)).astype(np.int64)
    places = np.where(whole != 0, exponents - 24 + lowest, np.iinfo(np.int64).max).min(-1)
    return np.where((w1 != 0).any(-1), places, 0)


def _network(features: base.Array, w1: base.Array, b1: base.Array, w2: base.Array, b2: np.float32) -> np.float32:
    """Return the score of one row of features [2 H]."""
    largest = np.abs(features).max()
    if not np.isfinite(largest):
        return np.float32(np.nan)
    # All features of a row share the largest one's exponent, as in block floating point.
    field = max(int(largest.view(np.uint32)) >> MANTISSA_BITS, LEAST_EXPONENT)
    whole = np.rint(np.ldexp(features.astype(np.float64), SCALE_FIELD - field)).astype(np.int64)
    hidden = list[np.float32]()
    for weights, place, bias in zip(w1, unit_exponents(w1).tolist(), b1, strict=True):
        units = np.ldexp(weights.astype(np.float64), -place).astype(np.int64)
        # Python integers never overflow, so this sum checks the 53-bit bound of the fabric instead of sharing it.
        total = sum(int(a) * int(b) for a, b in zip(units, whole, strict=True))
        with np.errstate(over="ignore"):
            # The sum rounds to float32 once. Both factors that follow are powers of two.
            scaled = np.float32(math.ldexp(float(np.float32(total)), place)) * np.float32(2.0 ** (field - SCALE_FIELD))
            hidden.append(max(scaled + bias, np.float32(0)))
    if not np.isfinite(hidden).all():
        return np.float32(np.nan)
    return np.float32(fixed_products(w2, np.array(hidden, np.float32)).sum()) * np.float32(2.0**-TAS_FRACTION_BITS) + b2
