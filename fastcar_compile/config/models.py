"""The models ReplayConfig, SparseAttention and Jacobi, and what a caller may write for their values."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, StrictInt, model_validator

from fastcar_compile.config.listing import Listing, Needs, one_of
from fastcar_compile.errors import CompileError, InputError, UserError, count_text
from fastcar_compile.gates import GATES, GateWeights, gate_class, gate_named
from fastcar_compile.gates.base import Rotary
from fastcar_compile.gates.draft import Draft
from fastcar_compile.gates.registry import weights_problem
from fastcar_compile.gates.weights import DIGEST
from fastcar_compile.support import limits
from fastcar_compile.support.values import checked, number, shown, whole

Heads = tuple[tuple[int, float], ...]
"""(query head, weight) pairs."""


def parse_threshold(value: object) -> float:
    """Return a threshold; JSON writes infinity as "inf" and "-inf"; ">-4" is the next float32 above -4.

    Raises:
        ValueError: the value is a boolean, a different string, or NaN.
    """
    text = value.strip().lower() if isinstance(value, str) else ""
    try:
        if text.startswith(">"):
            # A score is float32, so "more than" is "at least the next float32".
            return float(np.nextafter(np.float32(text[1:]), np.float32(np.inf)))
        if text in ("inf", "+inf", "-inf"):
            return float(text)
        return number("a threshold", value)
    except (InputError, ValueError) as error:
        if isinstance(error, InputError) and error.what.endswith("NaN"):
            raise ValueError("a threshold cannot be NaN") from error
        what = f"a threshold is a number, 'inf', '-inf' or '>' and a number, not {shown(value)}"
        raise ValueError(what) from error


def parse_heads(value: object) -> Heads | None:
    """Return one layer's heads from None, {head: weight}, [head, …] (equal weights) or [(head, weight), …].

    Raises:
        ValueError: the value has a different form, names a head twice, or has a weight that is not finite.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        items = list[object](sorted(cast("Mapping[Any, Any]", value).items()))
    else:
        given = _listed(value)
        items = [(item, 1 / len(given)) if isinstance(item, int) else item for item in given]
    pairs = [_pair(item) for item in items]
    if not pairs or len({head for head, _ in pairs}) != len(pairs):
        raise ValueError(f"heads are one or more query heads, each named once, not {value!r}")
    return tuple(pairs)


def _listed(value: object) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"heads are a list of query heads or a mapping head -> weight, not {value!r}")
    return cast("Sequence[object]", value)


def _pair(item: object) -> tuple[int, float]:
    with suppress(OverflowError):  # a whole number that no float can be
        match item:
            case (int() as head, Real() as weight) if not isinstance(head, bool) and math.isfinite(weight):
                return head, float(weight)
            case _:
                pass
    raise ValueError(f"{item!r} is not a query head with a finite weight")


def parse_layers_of_heads(value: object) -> tuple[Heads | None, ...] | None:
    """Return one entry for all layers, or one per layer; None: all heads everywhere.

    Raises:
        ValueError: an entry is not valid.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return (parse_heads(cast("Mapping[Any, Any]", value)),)
    items = _listed(value)
    return (parse_heads(items),) if all(type(item) is int for item in items) else tuple(map(parse_heads, items))


def parse_thresholds(value: object) -> float | tuple[float | None, ...] | None:
    """Return one threshold, or one per layer. It parses here, so that an error speaks of thresholds, not of a union.

    Raises:
        ValueError: a threshold is not valid.
    """
    if value is None:
        return None
    if isinstance(value, (list, tuple)) or len(getattr(value, "shape", ())) == 1:
        items = cast("Sequence[object]", value)
        return tuple(None if item is None else parse_threshold(item) for item in items)
    return parse_threshold(value)


def _parse_stored(value: object, kind: type[GateWeights] | type[Draft], what: str) -> GateWeights | Draft | None:
    """Return weights from themselves, from their file, or from the digest that stands for them in JSON."""
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return kind(value.removeprefix("sha256:"))
    if not isinstance(value, str | Path):
        raise ValueError(f"{what} a safetensors file, not {value!r}")
    return kind.load(value)


_parse_weights = partial(_parse_stored, kind=GateWeights, what="gate weights are")
_parse_draft = partial(_parse_stored, kind=Draft, what="a draft is")

_FINITE = PlainSerializer(lambda value: value if math.isfinite(value) else str(value), when_used="json")
"""JSON has no infinity."""
Threshold = Annotated[float, BeforeValidator(parse_threshold), _FINITE]
_NAMED = PlainSerializer(lambda weights: None if weights is None else weights.name, when_used="json")
Weights = Annotated[Any, BeforeValidator(_parse_weights), _NAMED]
"""A GateWeights or None; pydantic knows it as Any, because a GateWeights is not a model."""


Drafts = Annotated[Any, BeforeValidator(_parse_draft), _NAMED]
"""A Draft or None."""


EXPERT = Listing(expert=True)
WINDOW_POSITIONS = Listing(expert=True, word="window_positions")


@checked(CompileError)
class Config(BaseModel):
    """Frozen, without unknown fields. A refused value raises CompileError, which names every field at fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dict; infinite thresholds are the strings "inf" and "-inf"."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the configuration that `to_json` wrote.

        Raises:
            CompileError: a field is not valid.
        """
        return cls(**data)


class ReplayConfig(Config):
    """When an MLP output of the previous frame is replayed instead of computed.

    Args:
        gate: what decides: tas, input_delta, learned; always, never, random; default: tas. The names are those of
            `fastcar_compile.gates.GATES`; docs/reference/gates.md has their rules.
        threshold: a number, inf, -inf, ">-4" (score > -4), or one per layer; default: the gate's. The gate compares its
            score with it (docs/reference/gates.md): TAS replays iff score >= threshold, so that `inf` never passes; a
            change, iff score <= threshold. None means "never replay" (here, or in one layer of a list).
        draft: what a replay computes instead of the MLP, a file of `fit_draft` (`fastcar fit-draft`). Or a Draft. It
            brings its own gate: "learned" with the file's weights. A gate of another name has to keep the MLP's input.
        gate_weights: weights of gate learned, a .safetensors file (docs/reference/gates.md). Or a GateWeights. JSON
            keeps their digest, never the file's name.
        max_chain: replays in a row at one (layer, row, slot) at most. None is unlimited.
        refresh_every: every n-th frame computes everything. Its number t // F is a multiple of this; None: no limit.
        couple_cfg: rows b and b + B/2 (a classifier-free-guidance pair) replay only together.
        heads: query heads of gate tas: 0,2; or 0,2/all/3:1,1:-1 per layer. In Python a list of heads (alike), or a
            mapping head -> weight; or a list with one of these per layer (None: all heads there). Weights are used as
            given.
        rotary: for gate tas, both: query and key are rotated; or key: the query is that from before. With "both" they
            are as attention uses them and as the paper describes; "key" is as in the code that the authors published
            (docs/reference/gates.md#the-authors-rule).

    Raises:
        CompileError: a field or a file of weights is not valid. UserError: the file cannot be read.
    """

    gate: Annotated[str, one_of(GATES, "gate", "known gates")] = "tas"
    threshold: Annotated[Threshold | Sequence[Threshold | None] | None, BeforeValidator(parse_thresholds)] = None
    max_chain: Annotated[int | None, Field(ge=1, strict=True)] = None
    couple_cfg: Annotated[bool, Field(strict=True)] = False
    refresh_every: Annotated[int | None, Field(ge=2, strict=True)] = None
    heads: Annotated[tuple[Heads | None, ...] | None, BeforeValidator(parse_layers_of_heads), EXPERT] = None
    gate_weights: Weights = None
    rotary: Annotated[Rotary, EXPERT] = "both"
    draft: Drafts = None

    def __init__(self, **data: Any) -> None:
        """Set the gate's own threshold where the caller gives no threshold. None is a threshold too: never replay."""
        if data.get("draft") is not None and "gate_weights" not in data:
            data = _with_gate_of_draft(data)
        gate, given = data.get("gate", "tas"), "threshold" in data
        if not given and isinstance(gate, str) and gate in GATES:
            data = {**data, "threshold": GATES[gate].default_threshold}
        super().__init__(**data)
        if not given:  # `compile` warns of the default, but not of a caller who gives the same number
            self.model_fields_set.discard("threshold")

    @model_validator(mode="after")
    def _heads_and_weights_fit_the_gate(self) -> Self:
        gate_named(self.gate, None if self.heads is None else (), rotary=self.rotary)
        problem = weights_problem(self.gate, self.gate_weights is not None)
        if problem is not None:
            raise ValueError(problem)
        if self.draft is not None and not gate_class(self.gate).caches_input:
            raise ValueError(f"a draft needs the MLP's cached input, which gate {self.gate!r} does not keep")
        return self

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dict. It has files and `rotary` only where they are given: older journals stay valid."""
        left_out = (("gate_weights", None), ("draft", None), ("rotary", "both"))
        return {name: value for name, value in super().to_json().items() if (name, value) not in left_out}

    def heads_of(self, num_layers: int) -> tuple[Heads | None, ...]:
        """Return the (head, weight) pairs of every layer; empty: all heads everywhere.

        Raises:
            UserError: one entry per layer was given, but not as many as there are layers.
        """
        if self.heads is None:
            return ()
        if len(self.heads) == 1:
            return self.heads * num_layers
        if len(self.heads) != num_layers:
            what = f"heads of {count_text(len(self.heads), 'layer')} for a decoder of {count_text(num_layers, 'layer')}"
            hint = f"give one list for all layers, or exactly {num_layers} (None: all heads of this layer)"
            raise UserError(what, where="ReplayConfig.heads", hint=hint)
        return self.heads

    def thresholds(self, num_layers: int) -> tuple[float | None, ...]:
        """Return one threshold per layer; None where the layer never replays.

        Raises:
            UserError: the list's length is not the number of layers.
        """
        if not isinstance(self.threshold, Sequence):
            return (self.threshold,) * num_layers
        count = len(self.threshold)
        weighted = 0 if self.gate_weights is None else len(self.gate_weights.layers)
        if 1 < count != num_layers and count in (len(self.heads or ()), weighted):
            what = f"the gate belongs to another decoder: it has {count} layers, but this decoder has {num_layers}"
            hint = "train a gate for this decoder (fc.train_gate, fastcar train-gate)"
            raise UserError(what, where="ReplayConfig", hint=hint)
        if count != num_layers:
            what = f"{count_text(count, 'threshold')} for a decoder of {count_text(num_layers, 'layer')}"
            hint = f"give one number for all layers, or exactly {num_layers} (None: this layer never replays)"
            raise UserError(what, where="ReplayConfig.threshold", hint=hint)
        return tuple(self.threshold)


def _with_gate_of_draft(data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a ReplayConfig with its draft read, and the gate that was fitted with the draft."""
    try:
        draft = _parse_draft(data["draft"])
    except ValueError:
        return data  # the field's own validation reports it
    own = draft.gate if isinstance(draft, Draft) else None
    given = {**data, "draft": draft, "gate": data.get("gate", "learned")}
    return given if own is None or given["gate"] != "learned" else {**given, "gate_weights": own}


class SparseAttention(Config):
    """Attention sinks and a sliding window over a ring cache of bounded size (docs/explanation/sparse_attention.md).

    Args:
        window: sparse attention: each token attends to so many last ones, itself included.
        sinks: sparse attention: each token attends to so many first ones of the sequence too.
        positions: rotary positions with a window: absolute (in the sequence), or cache (inside of the cache). With
            "cache" a decoder never meets a distance of more than sinks + window tokens.

    Raises:
        CompileError: a field is not valid.
    """

    window: int = Field(default=256, ge=1, le=limits.SIZE, strict=True)
    sinks: Annotated[int, Field(ge=0, le=limits.SIZE, strict=True), Needs("window")] = 16
    positions: Annotated[Literal["absolute", "cache"], Needs("window"), WINDOW_POSITIONS] = "absolute"


AUTO_ROWS = 8
"""Rows that a decoder of `window="auto"` has by default: eight rows of int8 weights take hardly longer than one."""


@checked()
@dataclass(frozen=True)
class Jacobi:
    """Decode several positions of a video in one decode step, with the tokens of sequential decoding.

    Each row reads what is guessed of the token before it. The draw of a position has noise of its own (`Sampling`), so
    rows whose guesses were right give the tokens of sequential decoding, and the others the next guesses.

    Args:
        window: positions of a decode step, at most the decoder's rows and a frame; 1 is sequential decoding. "auto":
            the session takes as many as give the most tokens a second, by what it measures.

    Raises:
        InputError: the window is no whole number from 1 on, nor "auto".
    """

    window: StrictInt | Literal["auto"] = 8

    def __post_init__(self) -> None:
        given: Any = self.window
        if not isinstance(given, str):
            object.__setattr__(self, "window", whole("the window", given, 1))
        elif given != "auto":
            hint = 'give a number of positions, or "auto"'
            raise InputError(f"the window is {shown(given)}", where="Jacobi", hint=hint)

    def __str__(self) -> str:
        return f"Jacobi, window {self.window}"

    @property
    def rows(self) -> int | None:
        """Rows of each video that a decoder gets by default; None: one at a position that all videos share."""
        rows = AUTO_ROWS if isinstance(self.window, str) else self.window
        return None if rows == 1 else rows

    def problems(self, frame: int, rows: int | None) -> list[InputError]:
        """Return why a decoder cannot decode so; frame: its tokens per frame. rows: its rows of each video."""
        if isinstance(self.window, str):
            return []
        found: list[InputError] = []
        if self.window > (rows or 1):
            what = f"a window of {self.window} needs as many rows of each video, the decoder has {rows or 1}"
            found.append(InputError(what, where="Jacobi", hint=f"compile with rows={self.window}"))
        if self.window > frame:
            what = f"the window of {self.window} is longer than a frame of {frame} tokens"
            found.append(InputError(what, where="Jacobi", hint=f"give at most {frame}"))
        return found
