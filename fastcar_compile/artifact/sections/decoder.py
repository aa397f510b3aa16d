"""The decoder: its sizes, its state, and what its graphs take and give."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from fastcar_compile.config.formats import DTYPES, DType
from fastcar_compile.ir.types import DecoderConfig, LayerSite, StateRole

# What every part of a manifest is: frozen, typed, without unknown fields.


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


class LayersSection(Section):
    """Every layer, in order."""

    layers: tuple[LayerSite, ...]

    @property
    def thresholds(self) -> list[float | None]:
        """The compiled threshold of every layer; None: the layer never replays."""
        return [None if layer.replay is None else layer.replay.threshold for layer in self.layers]

    @property
    def gates(self) -> list[str | None]:
        """The gate of every layer; None: the layer never replays."""
        return [None if layer.replay is None else layer.replay.gate for layer in self.layers]
