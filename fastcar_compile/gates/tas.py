"""The paper's gate: the Temporal Attention Score, over all heads, over some of them, or weighted."""

import numpy as np

import fastcar_compile.gates.base as base
from fastcar_compile.gates.scores import fixed_products


class TasGate(base.FabricGate):
    """Attention logit with the same place one frame earlier, mean over query heads (FastCar, section 4.2)."""

    name = "tas"
    comparison = base.Comparison.AT_LEAST
    default_threshold = 2.0
    reads_query = True
    takes_heads = True
    flops_per_query_element = 2  # a multiplication and an addition

    def score(self, call: base.Call, values: base.GateValues[base.T]) -> base.T:
        """Return the TAS; a row replays where it is at least the threshold."""
        arguments = (values.query, values.key_cache, values.position, values.stride, values.scale)
        if self.heads is None:
            return call(base.operator("tas"), *arguments)
        heads, weights = [head for head, _ in self.heads], [weight for _, weight in self.heads]
        return call(base.operator("tas_heads"), *arguments, heads, weights)

    @staticmethod
    def exact_score(inputs: base.GateInputs[base.Array], constants: base.ScoreConstants) -> base.Array:
        """Return the TAS in numpy."""
        query, key = base.operand(inputs.query), base.operand(inputs.key)
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged factor or weight may be anything
            # The product with a head weight rounds to float32 once, before the exact integer sum.
            if constants.head_weights is not None:
                query = query * np.array(constants.head_weights, np.float32)[None, :, None]
            # Two roundings in this order: the int64 sum becomes float32, then the factor multiplies in float32.
            return tas_sums(query, key).astype(np.float32) * np.float32(constants.factor)

    def describe(self) -> str:
        """Return the mean, with its heads where they are chosen, and the query where it is another."""
        rotated = "" if self.rotary == "both" else ", with the query from before its rotation"
        if self.heads is None:
            return f"TAS, mean over query heads{rotated}"
        chosen = ", ".join(f"{head} (weight {weight:g})" for head, weight in self.heads)
        return f"TAS over query heads {chosen}{rotated}"


def tas_sums(query: base.Array, key: base.Array) -> base.Array:
    """Return the exact integer sums of products of 2^-24, int64 [B]; query float32 [B, Hq, D], key [B, Hkv, D]."""
    rows, _, dim = query.shape
    return fixed_products(query.reshape(rows, key.shape[1], -1, dim), key[:, :, None]).sum((1, 2, 3))
