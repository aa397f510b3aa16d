"""Gates on the change of the MLP's own input since the slot was last computed."""

from __future__ import annotations

from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, T, operator


class InputDeltaGate(Gate):
    """Relative change ||x - x_cached|| / ||x|| of the MLP's input.

    The norm is the sum of absolute values. It needs no multiplication, and on the example decoder it is a better
    signal than the Euclidean norm (docs/explanation/gates.md). x_cached is the input of the last computed visit, not of
    the last visit: a slow drift adds up until the slot computes again, however long the chain of replays is.
    """

    name = "input_delta"
    comparison = Comparison.AT_MOST
    default_threshold = 0.1
    caches_input = True

    def score(self, call: Call, values: GateValues[T]) -> T:
        """Return the change; a row replays where it is at most the threshold."""
        return call(operator("input_delta"), values.x, values.cached)

    def describe(self) -> str:
        """Return the formula."""
        return "relative change of the MLP input since this slot was last computed, ||x - x_cached|| / ||x||"


BOUND_WEIGHT = 0.1
"""Weight of the attention term beside the input's change; docs/explanation/gates.md says how it was chosen."""


class BoundGate(Gate):
    """Input change and attention together, after theorem 4.6 of the paper, which bounds the change of the output.

    score = ||x - x_cached|| / ||x|| + BOUND_WEIGHT * sqrt(max(0, 1 - A)). A is the mean over query heads of the cosine
    between query and key one frame earlier, which is the TAS of normalised vectors: only for them 1 - A is half of a
    squared distance.
    """

    name = "bound"
    comparison = Comparison.AT_MOST
    default_threshold = 0.2
    reads_query = True
    caches_input = True
    flops_per_query_element = 6  # query by key, and the squares of both

    def score(self, call: Call, values: GateValues[T]) -> T:
        """Return the bound; a row replays where it is at most the threshold."""
        arguments = (values.x, values.cached, values.query, values.key_cache, values.position, values.stride)
        return call(operator("output_bound"), *arguments, BOUND_WEIGHT)

    def describe(self) -> str:
        """Return the formula."""
        return (
            "bound on the change of the MLP output, ||x - x_cached|| / ||x|| + "
            f"{BOUND_WEIGHT:g} sqrt(1 - cosine of query and key one frame earlier)"
        )
