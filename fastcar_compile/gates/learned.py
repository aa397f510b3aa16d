"""A gate with weights of its own: a small network on the MLP's input and its change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastcar_compile.errors import CompileError
from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, T

fastcar = torch.ops.fastcar


@dataclass(frozen=True)
class LearnedGate(Gate):
    """What a replay would cost here, as a network with one hidden layer says: `fastcar train-gate` trains it.

    The cached input is that of the slot's last computed visit, as for `input_delta`. Thresholds are calibrated for the
    weights: they have no scale of their own.
    """

    name = "learned"
    comparison = Comparison.AT_MOST
    caches_input = True
    takes_weights = True
    one_scale = True
    default_threshold = 0.0

    def score(self, call: Call, values: GateValues[T]) -> T:
        """A score of at most the threshold replays."""
        network = (values.params[name] for name in self.params())
        return call(fastcar.learned_score.default, values.x, values.cached, *network)

    def params(self) -> dict[str, Tensor]:
        """w1, b1, w2 and b2.

        Raises:
            CompileError: the gate was made without its weights.
        """
        if self.weights is None:
            raise CompileError("gate learned has no weights", hint="give gate_weights=…, or --gate-weights FILE")
        return self.weights.params()

    def describe(self) -> str:
        """The formula."""
        units = "" if self.weights is None else f" of {self.weights.units} units"
        return f"a trained network{units}, w2 . relu(w1 @ [x ; |x - x_cached|] + b1) + b2"
