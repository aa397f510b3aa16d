"""User-facing configuration: what to compile and when to replay. Frozen pydantic models, JSON-safe, our own errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from fastcar_compile.errors import CompileError, UserError

KNOWN_GATES: tuple[str, ...] = ("tas",)
QUANT_MODES: tuple[str, ...] = ("none", "w8a8", "w4a8")
OFFLOAD_MODES: tuple[str, ...] = ("mlp", "linears")


def _parse_float(value: Any) -> Any:
    """Accepts the JSON spellings "inf" and "-inf"; refuses booleans, other texts and NaN."""
    if isinstance(value, str):
        if value.strip().lower() not in ("inf", "+inf", "-inf"):
            raise ValueError(f"a threshold is a number, 'inf' or '-inf', not {value!r}")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"a threshold is a number, 'inf' or '-inf', not {value!r}")
    if math.isnan(value):
        raise ValueError("a threshold cannot be NaN")
    return float(value)


def _dump_float(value: float) -> float | str:
    """JSON has no infinity: it is written as "inf" or "-inf"."""
    return value if math.isfinite(value) else str(value)


Threshold = Annotated[float, BeforeValidator(_parse_float), PlainSerializer(_dump_float, when_used="json")]


def describe_validation(error: ValidationError) -> list[str]:
    """One text per field that pydantic refused, as `field.path: reason`."""
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "(whole)"
        message = item["msg"].removeprefix("Value error, ")
        given = "" if item["type"] in ("missing", "value_error") else f" (given: {item['input']!r})"
        lines.append(f"{field}: {message}{given}")
    return lines


def _raise_compile_error(name: str, error: ValidationError) -> NoReturn:
    lines = describe_validation(error)
    raise CompileError(
        f"{name} is not valid: " + "; ".join(lines), mend=f"correct the field{'s' if len(lines) > 1 else ''} named"
    ) from error


class _Config(BaseModel):
    """Frozen, no unknown fields; a refused value raises CompileError with every field at fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            _raise_compile_error(type(self).__name__, error)

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe dict; infinite thresholds are the strings "inf" and "-inf"."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`. Raises CompileError on bad fields."""
        return cls(**data)


class ReplayConfig(_Config):
    """When an MLP output of the previous frame is replayed instead of computed.

    Args:
        gate: name of the gate; one of `KNOWN_GATES`.
        threshold: replay iff the gate's score is at least this. One number for all layers, or one per layer;
            None means "never replay" (here, or in that layer). `inf` never passes, `-inf` always does.
        max_chain: at most this many replays in a row at one (layer, row, slot); None is unlimited.
        couple_cfg: rows b and b + B/2 (a classifier-free-guidance pair) replay only together.

    Raises:
        CompileError: a field is not valid.
    """

    gate: str = "tas"
    threshold: Threshold | Sequence[Threshold | None] | None = 2.0
    max_chain: int | None = Field(default=None, ge=1, strict=True)
    couple_cfg: bool = Field(default=False, strict=True)

    @field_validator("gate")
    @classmethod
    def _known_gate(cls, gate: str) -> str:
        if gate not in KNOWN_GATES:
            raise ValueError(f"unknown gate {gate!r}; known gates: {', '.join(KNOWN_GATES)}")
        return gate

    @field_validator("threshold", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        """Parses here, so that the error speaks of thresholds and not of union members."""
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return tuple(None if item is None else _parse_float(item) for item in value)
        return _parse_float(value)

    def thresholds(self, num_layers: int) -> tuple[float | None, ...]:
        """One threshold per layer; None where the layer never replays.

        Raises:
            UserError: the list's length is not the number of layers.
        """
        if not isinstance(self.threshold, Sequence):
            return (self.threshold,) * num_layers
        if len(self.threshold) != num_layers:
            raise UserError(
                f"{len(self.threshold)} thresholds were given for a decoder of {num_layers} layers",
                where="ReplayConfig.threshold",
                mend=f"give one number for all layers, or exactly {num_layers} (None: this layer never replays)",
            )
        return tuple(self.threshold)


class CompileConfig(_Config):
    """Everything that shapes a compiled artifact besides the model itself.

    Args:
        target: name of the target (see `fastcar_compile.targets`).
        tokens_per_frame: stride F between a token and the same place in the previous frame; tokens.
        max_seq_len: positions in the static KV cache; tokens.
        batch_size: rows decoded together; at most 32 (the width of the DRS Index Register).
        quant: "none" (float32), "w8a8" or "w4a8" (int4 weights in groups of 128).
        replay: None compiles the dense decoder.
        prefill_chunk: tokens per call of the prefill graph.
        offload: what an accelerator computes: "mlp", or "linears": the MLPs, the projections and the head.

    Raises:
        CompileError: a field is not valid, or tokens_per_frame >= max_seq_len.
    """

    target: str
    tokens_per_frame: int = Field(ge=1, strict=True)
    max_seq_len: int = Field(ge=2, strict=True)
    batch_size: int = Field(default=1, ge=1, le=32, strict=True)
    quant: Literal["none", "w8a8", "w4a8"] = "none"
    replay: ReplayConfig | None = None
    prefill_chunk: int = Field(default=64, ge=1, strict=True)
    offload: Literal["mlp", "linears"] = "mlp"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens_per_frame >= self.max_seq_len:
            raise CompileError(
                f"tokens_per_frame ({self.tokens_per_frame}) is not smaller than max_seq_len ({self.max_seq_len}): "
                "no token would have a previous frame to replay",
                mend="lower tokens_per_frame to the tokens of one frame, or raise max_seq_len to at least two frames "
                f"({2 * self.tokens_per_frame})",
            )
        if self.replay is not None and self.replay.couple_cfg and self.batch_size % 2:
            raise CompileError(
                f"couple_cfg pairs row b with row b + batch_size / 2, but batch_size is {self.batch_size}",
                mend="use an even batch_size, or couple_cfg=False",
            )
        return self
