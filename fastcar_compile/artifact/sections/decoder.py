"""The decoder: its sizes, its state, and what its graphs take and give."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, field_validator, model_validator

from fastcar_compile.config.formats import DTYPES, DType
from fastcar_compile.ir.types import DecoderConfig, StateRole

# What every part of a manifest is: frozen, typed, without unknown fields.


def _parse_float(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf") else value


def _dump_float(value: float) -> float | str:
    return str(value) if value in (float("inf"), -float("inf")) else value


Float = Annotated[float, BeforeValidator(_parse_float), PlainSerializer(_dump_float, when_used="json")]
"""A float that JSON holds also where it is infinite, as "inf" or "-inf"."""


class Part(BaseModel):
    """Something inside a section."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(Part):
    """A part of the manifest with a version of its own. A change of a section's fields raises `VERSION`."""

    VERSION: ClassVar[int] = 1
    version: int = 0

    @model_validator(mode="before")
    @classmethod
    def _has_this_version(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, Any]", data)
        found = fields.get("version", cls.VERSION)
        if found != cls.VERSION:
            raise ValueError(f"version {found}; this fastcar_compile reads version {cls.VERSION}")
        return {**fields, "version": found}


class State(Part):
    """One state tensor: an input and an output of the graph under the same name. It starts at zero.

    A state of the context is an input only.

    Args:
        dtype: a name of `formats.dtypes`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: StateRole
    layer: int

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"there is no element type {dtype!r}")
        return dtype

    @property
    def format(self) -> DType:
        """The element type."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.format.itemsize * prod(self.shape)


class DecoderSection(Section):
    """The decoder as a session sees it.

    Args:
        outputs: names of the decode step's results, in order. prefill_outputs: the same of the prefill chunk.
        context_outputs: the states that the context graph makes, in order.
        weight_bytes: bytes of all parameters.
    """

    config: DecoderConfig
    state: tuple[State, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    prefill_outputs: tuple[str, ...]
    context_outputs: tuple[str, ...] = ()
    weight_bytes: int


# The decoder's layers: where attention and MLP are in the rewritten graph, and what replay was inserted.


class AttentionPart(Part):
    """Attention of one layer. `node`, `query` and the caches are node names; `scale` is the softmax scale.

    Args:
        cache_rows: positions that a cache has room for.
        window, sinks: a query sees the first `sinks` positions and the last `window` ones, itself included; `window`
            None: all of them.
        softcap: a logit becomes softcap * tanh(logit / softcap); None: it stays.
    """

    node: str
    query: str
    key_cache: str
    value_cache: str
    scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_rows: int
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None


class MlpPart(Part):
    """MLP of one layer, from node `input` to node `output`.

    Args:
        linears: nodes, in the order gate, up, down, or up, down. weights: their parameters. biases: the same, None
            where there is none.
        gated: the MLP is down(act(gate(x)) * up(x)), not down(act(up(x))).
        hidden: H, inputs and outputs. intermediate: outputs of up.
    """

    input: str
    output: str
    linears: tuple[str, ...]
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    activation: str
    gated: bool
    hidden: int
    intermediate: int


class ReplayPart(Part):
    """The gate of one layer.

    Args:
        heads: (query head, weight) pairs of a gate that averages over chosen heads; None: over all.
        gate_units: hidden units of a gate that is a network; None: it is none.
    """

    gate: str
    threshold: Float
    heads: tuple[tuple[int, float], ...] | None = None
    gate_units: int | None = None


class LayerPart(Part):
    """One decoder layer. The graph order is entry, attention, residual, norm, MLP, region_output, exit.

    `exit` adds `residual` and `region_output`; `residual` adds entry and attention.

    Args:
        module_path, source: where the layer is in the model and in its source.
        region_output: what the closing add `exit` adds to `residual`.
        parallel: the MLP reads the entry, as attention does, and not `residual`.
        replay: None: the layer never replays.
    """

    layer: int
    module_path: str
    source: str
    entry: str
    residual: str
    region_output: str
    exit: str
    attention: AttentionPart
    mlp: MlpPart
    replay: ReplayPart | None
    parallel: bool = False


class LayersSection(Section):
    """Every layer, in order."""

    layers: tuple[LayerPart, ...]

    @property
    def thresholds(self) -> list[float | None]:
        """The compiled threshold of every layer; None: the layer never replays."""
        return [None if layer.replay is None else layer.replay.threshold for layer in self.layers]

    @property
    def gates(self) -> list[str | None]:
        """The gate of every layer; None: the layer never replays."""
        return [None if layer.replay is None else layer.replay.gate for layer in self.layers]
