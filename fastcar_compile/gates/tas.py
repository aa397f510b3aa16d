"""The paper's gate: the Temporal Attention Score, over all heads, over some of them, or weighted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, T

fastcar = torch.ops.fastcar


@dataclass(frozen=True)
class TasGate(Gate):
    """Attention logit with the same place one frame earlier, mean over query heads (FastCar, section 4.2)."""

    name = "tas"
    comparison = Comparison.AT_LEAST
    reads_query = True
    takes_heads = True
    default_threshold = 2.0

    def score(self, call: Call, values: GateValues[T]) -> T:
        """TAS >= threshold replays."""
        arguments = (values.query, values.key_cache, values.position, values.stride, values.scale)
        if self.heads is None:
            return call(fastcar.tas.default, *arguments)
        heads, weights = ([pair[i] for pair in self.heads] for i in (0, 1))
        return call(fastcar.tas_heads.default, *arguments, heads, weights)

    def describe(self) -> str:
        """Names the heads where they are chosen."""
        if self.heads is None:
            return "TAS, mean over query heads"
        chosen = ", ".join(f"{head} (weight {weight:g})" for head, weight in self.heads)
        return f"TAS over query heads {chosen}"
