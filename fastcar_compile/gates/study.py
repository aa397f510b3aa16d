"""Gates that only serve comparisons: the cost of replay without any knowledge of a token."""

from typing import ClassVar

from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, T, operator


class _Constant(Gate):
    comparison = Comparison.AT_MOST
    default_threshold = 0.0
    study = True

    value: ClassVar[float]

    def score(self, call: Call, values: GateValues[T]) -> T:
        """Return the value, once per forward number and row, as the decision has it."""
        return call(operator("constant_score"), values.step, values.rows, self.value)


class AlwaysGate(_Constant):
    """Score 0: replays wherever the first frame and the chain limits allow, at any threshold from 0 on."""

    name = "always"
    value = 0.0

    def describe(self) -> str:
        """Return the formula."""
        return "0 (study: replays wherever it may)"


class NeverGate(_Constant):
    """Score infinity: computes at every finite threshold."""

    name = "never"
    value = float("inf")

    def describe(self) -> str:
        """Return the formula."""
        return "infinity (study: computes at every finite threshold)"


class RandomGate(Gate):
    """A hash of (forward, layer, row), uniform in (0, 1]: the threshold is the share that replays.

    The hash keeps no state, so that every backend draws the same numbers.
    """

    name = "random"
    comparison = Comparison.AT_MOST
    default_threshold = 0.5
    study = True

    def score(self, call: Call, values: GateValues[T]) -> T:
        """Return the number; a row replays where it is at most the threshold."""
        return call(operator("random_score"), values.step, values.rows, values.layer)

    def describe(self) -> str:
        """Return the formula."""
        return "hash of (forward, layer, row), uniform in (0, 1] (study: the threshold is the share that replays)"
