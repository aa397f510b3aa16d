"""Gates on the change of the MLP's own input since the slot was last computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, T

fastcar = torch.ops.fastcar


@dataclass(frozen=True)
class InputDeltaGate(Gate):
    """Relative change ||x - x_cached|| / ||x|| of the MLP's input.

    The norm is the sum of absolute values: no multiplications, and on the example decoder a better signal than the
    Euclidean norm (docs/explanation/gates.md). The comparison is with the input of the last computed visit, not of the
    last visit: a slow drift adds up until the slot computes again, however long the chain of replays.
    """

    name = "input_delta"
    comparison = Comparison.AT_MOST
    caches_input = True
    default_threshold = 0.1

    def score(self, call: Call, values: GateValues[T]) -> T:
        """A change of at most the threshold replays."""
        return call(fastcar.input_delta.default, values.x, values.cached)

    def describe(self) -> str:
        """The formula."""
        return "relative change of the MLP input since this slot was last computed, ||x - x_cached|| / ||x||"


BOUND_WEIGHT = 0.1
"""Of the attention term beside the input's change; docs/explanation/gates.md says how it was chosen."""


@dataclass(frozen=True)
class BoundGate(Gate):
    """Input change and attention together, after theorem 4.6 of the paper, which bounds the change of the output.

    score = ||x - x_cached|| / ||x|| + BOUND_WEIGHT * sqrt(max(0, 1 - A)), with A the mean over query heads of the
    cosine between query and key one frame earlier: TAS of normalised vectors, as only for them 1 - A is a (halved)
    squared distance.
    """

    name = "bound"
    comparison = Comparison.AT_MOST
    reads_query = True
    caches_input = True
    default_threshold = 0.2

    def score(self, call: Call, values: GateValues[T]) -> T:
        """A bound of at most the threshold replays."""
        arguments = (values.x, values.cached, values.query, values.key_cache, values.position, values.stride)
        return call(fastcar.output_bound.default, *arguments, BOUND_WEIGHT)

    def describe(self) -> str:
        """The formula."""
        return (
            "bound on the change of the MLP output, ||x - x_cached|| / ||x|| + "
            f"{BOUND_WEIGHT:g} sqrt(1 - cosine of query and key one frame earlier)"
        )
