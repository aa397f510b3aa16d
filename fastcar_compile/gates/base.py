"""What a gate is: what it caches, its score, its comparison. Every backend is lowered from this one definition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from fastcar_compile.gates.weights import LayerWeights

T = TypeVar("T")


class Comparison(Enum):
    """When a score lets a row replay, and the threshold at which it never does."""

    AT_LEAST = ">="
    AT_MOST = "<="

    @property
    def never(self) -> float:
        """The threshold that no finite score passes."""
        return float("inf") if self is Comparison.AT_LEAST else -float("inf")

    @property
    def always(self) -> float:
        """The threshold that every finite score passes."""
        return -self.never


@dataclass(frozen=True)
class GateValues(Generic[T]):
    """What a score may read; graph nodes while a pass builds it, tensors where it is evaluated.

    Attributes:
        query: float32 [B, Hq, 1, D], as attention uses it.
        key_cache: float32 [B, Hkv, S, D], this token's key written.
        position: int64 [1], sequence position.
        step: int64 [n], decode forward numbers; n = 1 in a decode step.
        x: float32 [B, H], the MLP's input after the norm; only for a gate that caches it.
        cached: float32 [B, H], x when this slot was last computed; only for such a gate.
        stride: tokens per frame. scale: the attention's own factor. layer: index. rows: batch rows.
        params: the gate's own parameters, by the names of `Gate.params`.
    """

    query: T
    key_cache: T
    position: T
    step: T
    x: T | None
    cached: T | None
    stride: int
    scale: float
    layer: int
    rows: int
    params: Mapping[str, T] = field(default_factory=dict)


class Call(Protocol):
    """Applies an operator: inserts a node, or computes."""

    def __call__(self, op: Callable[..., Any], *args: Any) -> Any:
        """The operator's result."""
        ...


@dataclass(frozen=True)
class Gate(ABC):
    """Decides per row whether an MLP output is replayed. Fields of the dataclass are its options.

    Attributes:
        name: in the registry, in ReplayConfig and on the command line.
        comparison: how the score meets the threshold.
        reads_query: the score compares the query with the key one frame earlier.
        caches_input: the MLP's input of the last computed visit of every slot is kept, float32 [F, B, H] per layer.
        default_threshold: where the caller gives none.
        one_scale: scores of all layers mean the same: calibration begins with one threshold for every layer.
        study: only for comparisons, never a choice for a product.
        heads: (head, weight) pairs of a gate that averages over heads; None: all of them alike.
        weights: of a gate that was trained; None: only its description is asked for.
    """

    name: ClassVar[str]
    comparison: ClassVar[Comparison]
    reads_query: ClassVar[bool] = False
    caches_input: ClassVar[bool] = False
    takes_heads: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = False
    default_threshold: ClassVar[float]
    one_scale: ClassVar[bool] = False
    study: ClassVar[bool] = False

    heads: tuple[tuple[int, float], ...] | None = None
    weights: LayerWeights | None = None

    def params(self) -> dict[str, Tensor]:
        """What the score reads besides its values, in the program as `gate_{name}_{layer}`. Most gates have none."""
        return {}

    @abstractmethod
    def score(self, call: Call, values: GateValues[T]) -> T:
        """The score, float32 [B] (float32 [n * B] for n forward numbers)."""

    @abstractmethod
    def describe(self) -> str:
        """The score in words, for `explain`."""
