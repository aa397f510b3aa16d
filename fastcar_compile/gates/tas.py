"""The paper's gate: the Temporal Attention Score, over all heads, over some of them, or weighted."""

from __future__ import annotations

from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, T, operator


class TasGate(Gate):
    """Attention logit with the same place one frame earlier, mean over query heads (FastCar, section 4.2)."""

    name = "tas"
    comparison = Comparison.AT_LEAST
    default_threshold = 2.0
    reads_query = True
    takes_heads = True
    flops_per_query_element = 2  # a multiplication and an addition

    def score(self, call: Call, values: GateValues[T]) -> T:
        """Return the TAS; a row replays where it is at least the threshold."""
        arguments = (values.query, values.key_cache, values.position, values.stride, values.scale)
        if self.heads is None:
            return call(operator("tas"), *arguments)
        heads, weights = [head for head, _ in self.heads], [weight for _, weight in self.heads]
        return call(operator("tas_heads"), *arguments, heads, weights)

    def describe(self) -> str:
        """Return the mean, with its heads where they are chosen."""
        if self.heads is None:
            return "TAS, mean over query heads"
        chosen = ", ".join(f"{head} (weight {weight:g})" for head, weight in self.heads)
        return f"TAS over query heads {chosen}"
