"""A gate of another package: one file, made of ATen operators alone, so that no backend needs to know it."""

from dataclasses import dataclass

from fastcar_compile.gates import Call, Comparison, Gate, GateValues, operator
from fastcar_compile.gates.base import T


@dataclass(frozen=True)
class EuclideanGate(Gate):
    """Relative change of the MLP's input in the Euclidean norm: ||x - x_cached||_2 / ||x||_2."""

    name = "euclidean"
    comparison = Comparison.AT_MOST
    default_threshold = 0.1
    caches_input = True

    def score(self, call: Call, values: GateValues[T]) -> T:
        """Return the change; a row replays where it is at most the threshold."""
        norm = operator("linalg_vector_norm", namespace="aten")
        difference = call(operator("sub", "Tensor", "aten"), values.x, values.cached)
        lengths = (call(norm, tensor, 2, [1]) for tensor in (difference, values.x))
        return call(operator("div", "Tensor", "aten"), *lengths)

    def describe(self) -> str:
        """Return the formula."""
        return "Euclidean change of the MLP input since this slot was last computed, ||x - x_cached||_2 / ||x||_2"
