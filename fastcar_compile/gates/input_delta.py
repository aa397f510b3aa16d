"""Gates on the change of the MLP's own input since the slot was last computed."""

import numpy as np

import fastcar_compile.gates.base as base
from fastcar_compile.gates.scores import COSINE_BITS, fixed_products


class InputDeltaGate(base.FabricGate):
    """Relative change ||x - x_cached|| / ||x|| of the MLP's input.

    The norm is the sum of absolute values. It needs no multiplication, and on the example decoder it is a better
    signal than the Euclidean norm (docs/explanation/gates.md). x_cached is the input of the last computed visit, not of
    the last visit: a slow drift adds up until the slot computes again, however long the chain of replays is.
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


BOUND_WEIGHT = 0.1
"""Weight of the attention term beside the input's change; docs/explanation/gates.md says how it was chosen."""


class BoundGate(base.FabricGate):
    """Input change and attention together, after theorem 4.6 of the paper, which bounds the change of the output.

    score = ||x - x_cached|| / ||x|| + BOUND_WEIGHT * sqrt(max(0, 1 - A)). A is the mean over query heads of the cosine
    between query and key one frame earlier, which is the TAS of normalised vectors: only for them 1 - A is half of a
    squared distance.
    """

    name = "bound"
    comparison = base.Comparison.AT_MOST
    default_threshold = 0.2
    reads_query = True
    caches_input = True
    flops_per_query_element = 6  # query by key, and the squares of both

    def score(self, call: base.Call, values: base.GateValues[base.T]) -> base.T:
        """Return the bound; a row replays where it is at most the threshold."""
        arguments = (values.x, values.cached, values.query, values.key_cache, values.position, values.stride)
        return call(base.operator("output_bound"), *arguments, BOUND_WEIGHT)

    @staticmethod
    def exact_score(inputs: base.GateInputs[base.Array], constants: base.ScoreConstants) -> base.Array:
        """Return the bound in numpy; its factor is `distance_factor` of the query heads."""
        query, key = base.operand(inputs.query), base.operand(inputs.key)
        rows, heads, dim = query.shape
        own = query.reshape(rows, key.shape[1], -1, dim)
        other = key[:, :, None]
        dots, squares, others = (fixed_products(*pair).sum(-1) for pair in ((own, other), (own, own), (other, other)))
        # The floor of 1 keeps a head of zeros from dividing by zero. Its cosine is then 0.
        lengths = np.sqrt(np.maximum(squares.astype(np.float32) * others.astype(np.float32), np.float32(1)))
        cosines = np.clip(dots.astype(np.float32) / lengths, np.float32(-1), np.float32(1))
        # Cosines become integers before they are averaged: the sum over heads is exact in any order.
        near = np.rint(cosines * np.float32(1 << COSINE_BITS)).astype(np.int64)
        apart = (heads * (1 << COSINE_BITS) - near.sum((1, 2))).astype(np.float32)
        distance = np.sqrt(apart * np.float32(constants.factor))
        finite = np.isfinite(query).all((1, 2)) & np.isfinite(key).all((1, 2))
        score = InputDeltaGate.exact_score(inputs, constants) + np.float32(constants.distance_weight) * distance
        return np.where(finite, score, np.float32(np.nan))

    def describe(self) -> str:
        """Return the formula."""
        return (
            "bound on the change of the MLP output, ||x - x_cached|| / ||x|| + "
            f"{BOUND_WEIGHT:g} sqrt(1 - cosine of query and key one frame earlier)"
        )
