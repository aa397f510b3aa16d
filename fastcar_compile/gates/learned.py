"""A gate with weights of its own: a small network on the MLP's input and its change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastcar_compile.errors import CompileError
from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, T, operator

if TYPE_CHECKING:
    from torch import Tensor


class LearnedGate(Gate):
    """The cost of a replay, predicted by a network with one hidden layer. `fastcar train-gate` trains it.

    The cached input is the input of the slot's last computed visit, as for `input_delta`. The score has no scale of its
    own, so that thresholds are calibrated for the weights.
    """

    name = "learned"
    comparison = Comparison.AT_MOST
    default_threshold = 0.0
    caches_input = True
    takes_weights = True
    one_scale = True

    def score(self, call: Call, values: GateValues[T]) -> T:
        """Return the network's output; a row replays where it is at most the threshold."""
        network = (values.params[name] for name in self.params())
        return call(operator("learned_score"), values.x, values.cached, *network)

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
