"""Gates that only serve comparisons: what replay costs when nothing is known about a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, T

fastcar, aten = torch.ops.fastcar, torch.ops.aten


@dataclass(frozen=True)
class _Constant(Gate):
    comparison = Comparison.AT_MOST
    default_threshold = 0.0
    study = True

    def _constant(self, call: Call, values: GateValues[T], value: float) -> T:
        """Follows from the forward numbers, so that it has as many elements as the decision."""
        return call(fastcar.constant_score.default, values.step, values.rows, value)


@dataclass(frozen=True)
class AlwaysGate(_Constant):
    """Score 0: replays wherever the first frame and the chain limits allow, at any threshold from 0 on."""

    name = "always"

    def score(self, call: Call, values: GateValues[T]) -> T:
        """0."""
        return self._constant(call, values, 0.0)

    def describe(self) -> str:
        """The formula."""
        return "0 (study: replays wherever it may)"


@dataclass(frozen=True)
class NeverGate(_Constant):
    """Score infinity: computes at every finite threshold."""

    name = "never"

    def score(self, call: Call, values: GateValues[T]) -> T:
        """Infinity."""
        return self._constant(call, values, float("inf"))

    def describe(self) -> str:
        """The formula."""
        return "infinity (study: computes at every finite threshold)"


@dataclass(frozen=True)
class RandomGate(Gate):
    """A hash of (forward, layer, row), uniform in (0, 1]: the threshold is the share that replays.

    Counter-based, so that every backend draws the same numbers and no state is kept.
    """

    name = "random"
    comparison = Comparison.AT_MOST
    default_threshold = 0.5
    study = True

    def score(self, call: Call, values: GateValues[T]) -> T:
        """A number of at most the threshold replays."""
        return call(fastcar.random_score.default, values.step, values.rows, values.layer)

    def describe(self) -> str:
        """The formula."""
        return "hash of (forward, layer, row), uniform in (0, 1] (study: the threshold is the share that replays)"
