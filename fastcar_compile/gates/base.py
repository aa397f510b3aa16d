"""Definition of a gate: facts, cached values, score and comparison. Every backend is lowered from this definition.

A gate's facts need no torch. Torch is loaded where a score is inserted into a graph or computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from fastcar_compile.errors import InternalError
from fastcar_compile.gates.weights import LayerWeights
from fastcar_compile.support.values import Array

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

Rotary = Literal["both", "key"]


class Comparison(Enum):
    """The comparison of score and threshold that lets a row replay."""

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
    """Operands of a score: graph nodes while a pass builds the score, tensors where it is evaluated.

    Attributes:
        query: float32 [B, Hq, 1, D], as attention uses it; with rotary "key" as it is before its rotation.
        key_cache: float32 [B, Hkv, S, D], this token's key written.
        position: int64 [1], sequence position.
        step: int64 [n], decode forward numbers; n = 1 in a decode step.
        x: float32 [B, H], the MLP's input after the norm; only for a gate that caches it.
        cached: float32 [B, H], x when this slot was last computed; only for a gate that caches x.
        stride: tokens per frame. scale: the attention's own factor. layer: index of the layer. rows: batch rows.
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
    params: Mapping[str, T] = field(default_factory=dict[str, T])


class Call(Protocol):
    """A function that applies an operator: it inserts a node, or computes."""

    def __call__(self, op: Callable[..., Any], *args: Any) -> Any:
        """Return the operator's result."""
        ...


def operator(name: str, overload: str = "default", namespace: str = "fastcar") -> Callable[..., Any]:
    """Return a registered operator, for example `fastcar::tas`. This call loads torch."""
    import torch

    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@dataclass(frozen=True)
class Gate(ABC):
    """Decides per row whether an MLP output is replayed. The fields of the dataclass are its options.

    Attributes:
        name: name in the registry, in ReplayConfig and on the command line.
        comparison: comparison of the score with the threshold.
        default_threshold: threshold where the caller gives no threshold.
        reads_query: the score compares the query with the key one frame earlier.
        caches_input: the MLP's input of the last computed visit of every slot is kept, float32 [F, B, H] per layer.
        takes_heads: the score averages over query heads, which the caller may choose.
        takes_weights: the gate is a trained network.
        one_scale: scores of all layers mean the same, so that calibration begins with one threshold for every layer.
        study: only for comparisons, never a choice for a product.
        flops_per_query_element: operations of the score for each of the Hq x D elements of a query.
        heads: (head, weight) pairs of a gate that averages over heads; None: all heads alike.
        weights: weights of a trained gate; None: the caller needs only the gate's facts.
        rotary: of a gate that compares the query with a key, what is rotated: "both", or the "key" alone.
    """

    name: ClassVar[str]
    comparison: ClassVar[Comparison]
    default_threshold: ClassVar[float]
    reads_query: ClassVar[bool] = False
    caches_input: ClassVar[bool] = False
    takes_heads: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = False
    one_scale: ClassVar[bool] = False
    study: ClassVar[bool] = False
    flops_per_query_element: ClassVar[int] = 0

    heads: tuple[tuple[int, float], ...] | None = None
    weights: LayerWeights | None = None
    rotary: Rotary = "both"

    def params(self) -> dict[str, Tensor]:
        """Return the parameters of the score; the program names them `gate_{name}_{layer}`."""
        return {}

    @abstractmethod
    def score(self, call: Call, values: GateValues[T]) -> T:
        """Return the score, float32 [B] (float32 [n * B] for n forward numbers)."""

    @abstractmethod
    def describe(self) -> str:
        """Return the score in words, for `explain`."""


@dataclass(frozen=True)
class GateInputs(Generic[T]):
    """Operands that a gate compares; None: the gate does not read this operand.

    Args:
        query: float32 [B, Hq, D]. key: float32 [B, Hkv, D], the cached key one frame earlier.
        x: float32 [B, H], the MLP's input. cached: float32 [B, H], the input at the slot's last computed visit.
    """

    query: T | None = None
    key: T | None = None
    x: T | None = None
    cached: T | None = None


@dataclass(frozen=True)
class ScoreConstants:
    """What a layer's score is computed with, besides its operands.

    Args:
        factor: of the integer sum over query heads.
        head_weights: float32 of each query head in gate `tas`; None: the mean over all heads.
        network: w1 float32 [units, 2 H] with the values of bfloat16, b1 and w2 float32 [units], b2 float32 [1], of gate
            `learned`.
    """

    factor: float = 1.0
    head_weights: Sequence[float] | None = None
    network: Sequence[Array] | None = None


class FabricGate(Gate):
    """A gate that the accelerator decides. Its score has a second definition, which shares no code with the first."""

    @staticmethod
    @abstractmethod
    def exact_score(inputs: GateInputs[Array], constants: ScoreConstants) -> Array:
        """Return the score in numpy, float32 [B], bit for bit (docs/reference/numerics.md, "Scores, bit for bit").

        Sums are of int64 or Python's integers. Operands that the gate does not read are None.
        """


def operand(value: T | None) -> T:
    """Return an operand that the gate reads.

    Raises:
        InternalError: the caller left it out.
    """
    if value is None:
        raise InternalError("a gate was called without an operand that it reads")
    return value
