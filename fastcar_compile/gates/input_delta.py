"""The gate on the change of the MLP's own input since the slot was last computed."""

import numpy as np

import fastcar_compile.gates.base as base
from fastcar_compile.gates.scores import fixed_products


class InputDeltaGate(base.FabricGate):
    """Relative change ||x - x_cached|| / ||x|| of the MLP's input.

    The norm is the sum of absolute values. It needs no multiplication, and on the example decoder it is a better
    signal than the Euclidean norm. x_cached is the input of the last computed visit, not of the last visit: a slow
    drift adds up until the slot computes again, however long the chain of replays is.
    """

    name = "input_delta"
    comparison = base.Comparison.AT_MOST
    default_threshold = 0.1
    caches_input = True

    def score(self, call: base.Call, values: base.GateValues[base.T]) -> base.T:
        """Return the change; a row replays where it is at most the threshold."""
        return call(base.operator("input_delta"), values.x, values.cached)

    @staticmethod
    def exact_score(inputs: base.GateInputs[base.Array], constants: base.ScoreConstants) -> base.Array:
        """Return the change in numpy."""
        x, cached = base.operand(inputs.x), base.operand(inputs.cached)
        with np.errstate(invalid="ignore", over="ignore"):
            change = np.abs(x - cached)
        # A product with 1 turns a float32 into the same fixed-point units that all other sums have.
        one = np.ones((), np.float32)
        sums = [fixed_products(np.abs(v), one).sum(-1).astype(np.float32) for v in (change, x)]
        # The divisor is at least 1, so an input of zeros cannot divide by zero.
        return np.where(np.isfinite(change).all(-1), sums[0] / np.maximum(sums[1], one), np.float32(np.nan))

    def describe(self) -> str:
        """Return the formula."""
        return "relative change of the MLP input since this slot was last computed, ||x - x_cached|| / ||x||"
