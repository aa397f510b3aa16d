"""The models CompileConfig, ReplayConfig and SparseAttention, and what a caller may write for their values."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from fastcar_compile.config.formats import ACCELERATED, KV_TYPES, QUANT_FORMATS, quant_format
from fastcar_compile.config.jacobi import Jacobi
from fastcar_compile.config.wavefront import Wavefront
from fastcar_compile.errors import CompileError, InputError, UserError, count_text, names_text
from fastcar_compile.gates import GATES, GateWeights, gate_class, gate_named
from fastcar_compile.gates.base import Rotary
from fastcar_compile.gates.draft import Draft
from fastcar_compile.gates.registry import weights_problem
from fastcar_compile.gates.weights import DIGEST
from fastcar_compile.support import limits
from fastcar_compile.support.values import checked, number, shown

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


def _parse_order(value: object, kind: type[Wavefront] | type[Jacobi], example: str) -> Wavefront | Jacobi | None:
    """Return an order of decoding from itself, or from its fields as JSON has them."""
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"an order is {example}, not {shown(value)}")
    try:
        return kind(**cast("Mapping[str, Any]", value))
    except InputError as error:
        raise ValueError(error.what) from error


def _order(kind: type[Wavefront] | type[Jacobi], example: str) -> tuple[BeforeValidator, PlainSerializer]:
    parse = BeforeValidator(partial(_parse_order, kind=kind, example=example))
    return parse, PlainSerializer(lambda order: order and asdict(order), when_used="json")


Front = Annotated[Any, *_order(Wavefront, "fc.Wavefront(grid=(rows, columns), lag=2)")]
"""A Wavefront or None."""
Guesses = Annotated[Any, *_order(Jacobi, "fc.Jacobi(window=8)")]
"""A Jacobi or None."""
Drafts = Annotated[Any, BeforeValidator(_parse_draft), _NAMED]
"""A Draft or None."""


def _one_of(known: Mapping[str, object], what: str, listed: str = "known") -> AfterValidator:
    """Return a validator of names that a registry has."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; {listed}: {names_text(known, name)}")
        return name

    return AfterValidator(check)


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


_WHOLE_STEP = {"kv": "int8", "numerics": "exact"}
"""Options that offload "all" implies."""


class ReplayConfig(Config):
    """When an MLP output of the previous frame is replayed instead of computed.

    Args:
        gate: name of the gate; one of `fastcar_compile.gates.GATES`.
        threshold: what the gate compares its score with (docs/reference/gates.md; TAS: replay iff score >= threshold,
            so that `inf` never passes, and ">-4", the next float32, means score > -4; a change: replay iff
            score <= threshold). One number for all layers, or one per layer; None means "never replay" (here, or in
            that layer). Default: the gate's own.
        max_chain: at most this many replays in a row at one (layer, row, slot); None is unlimited.
        couple_cfg: rows b and b + B/2 (a classifier-free-guidance pair) replay only together.
        refresh_every: all rows compute in every frame whose number t // F is a multiple of this; None: no limit.
        heads: for gate "tas", the query heads that the score averages: a list of heads (alike), or a mapping head ->
            weight; or a list with one of these per layer (None: all heads there). Weights are used as given.
        gate_weights: for gate "learned", the safetensors file of its weights (docs/reference/gates.md), or a
            GateWeights. JSON keeps their digest, never the file's name.
        rotary: for gate "tas": "both": query and key are rotated, as attention uses them and as the paper describes;
            "key": the query is that from before its rotary embedding, as in the code that the authors published
            (docs/reference/gates.md#the-authors-rule).
        draft: what a row that replays gets instead of the cached output: the safetensors file of `fit_draft`, or a
            Draft. Its own gate is the default then: "learned" with the file's weights. A gate of another name has to
            keep the MLP's input.

    Raises:
        CompileError: a field or a file of weights is not valid. UserError: the file cannot be read.
    """

    gate: Annotated[str, _one_of(GATES, "gate", "known gates")] = "tas"
    threshold: Annotated[Threshold | Sequence[Threshold | None] | None, BeforeValidator(parse_thresholds)] = None
    max_chain: int | None = Field(default=None, ge=1, strict=True)
    couple_cfg: bool = Field(default=False, strict=True)
    refresh_every: int | None = Field(default=None, ge=2, strict=True)
    heads: Annotated[tuple[Heads | None, ...] | None, BeforeValidator(parse_layers_of_heads)] = None
    gate_weights: Weights = None
    rotary: Rotary = "both"
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
        window: the most recent tokens that a token attends to, itself included.
        sinks: the first tokens of the sequence, which every token attends to.
        positions: "absolute": rotary positions count in the sequence; "cache": they count inside the cache, so that a
            decoder never meets a distance of more than sinks + window tokens.

    Raises:
        CompileError: a field is not valid.
    """

    window: int = Field(default=256, ge=1, le=limits.SIZE, strict=True)
    sinks: int = Field(default=16, ge=0, le=limits.SIZE, strict=True)
    positions: Literal["absolute", "cache"] = "absolute"


SMALLEST_CHUNK, LARGEST_CHUNK = 64, 256
"""Tokens of a prefill chunk by default. Measured: a chunk of 256 takes a fifth less time per token
than a chunk of 64, and a chunk of 512 takes no less."""


class CompileConfig(Config):
    """Everything that shapes a compiled artifact besides the model itself.

    Args:
        target: name of the target (see `fastcar_compile.config.targets`).
        tokens_per_frame: stride F between a token and the same place in the previous frame; tokens.
        max_seq_len: positions of a sequence; tokens. Without sparse attention the KV cache has as many rows.
        batch_size: rows decoded together; at most 32 (the width of the DRS Index Register).
        quant: "none" (float32), "bf16" or "fp16" (bfloat16 or float16 weights, float32 sums), "w8a8" or "w4a8" (int4
            weights in groups of 128). With "bf16" some CPUs round more than eight rows, as of a prompt, to bfloat16.
        rows: rows of each video in a decode step, each with a position of its own; batch_size x rows is at most 32.
            None: one row of each, and all share one position.
        wavefront: the order in which `generate` decodes; None: raster order.
        jacobi: how many positions of a video `generate` decodes at once, on guesses; None: one.
        replay: None compiles the dense decoder.
        prefill_chunk: tokens per call of the prefill graph; None: 64, or where a frame has more, an equal part of a
            frame of at most 256.
        offload: what an accelerator computes: "mlp"; "linears": the MLPs, the projections and the head; or "all": the
            whole decode step, one launch per token. "all" implies kv "int8" and numerics "exact".
        engine: what computes an accelerator's linears and MLPs: "hls": its one kernel, in C++; "rtl": a kernel of their
            own (docs/explanation/accelerator.md#the-rtl).
        sparse_attention: None: attention to all positions.
        kv: type of cached keys and values, a name of `fastcar_compile.config.formats.KV_TYPES`. `compile` says more.
        numerics: "native": attention, norms and rotary positions are float32, summed in each backend's own order.
            "exact": they are defined bit for bit too, so that logits and decisions are equal on every backend that has
            exact numerics, for every number of threads and in prefill; needs quant w8a8 or w4a8, and kv int8.

    Raises:
        CompileError: a field is not valid, tokens_per_frame >= max_seq_len, or exact numerics or offload "all" of other
            types.
    """

    target: str
    tokens_per_frame: int = Field(ge=1, le=limits.SIZE, strict=True)
    max_seq_len: int = Field(ge=2, le=limits.SIZE, strict=True)
    batch_size: int = Field(default=1, ge=1, le=32, strict=True)
    quant: Annotated[str, _one_of(QUANT_FORMATS, "quantisation")] = "none"
    rows: int | None = Field(default=None, ge=1, le=32, strict=True)
    wavefront: Front = None
    jacobi: Guesses = None
    replay: ReplayConfig | None = None
    prefill_chunk: int | None = Field(default=None, ge=1, le=limits.SIZE, strict=True)
    offload: Literal["mlp", "linears", "all"] = "mlp"
    engine: Literal["hls", "rtl"] = "hls"
    sparse_attention: SparseAttention | None = None
    kv: Annotated[str, _one_of(KV_TYPES, "KV type")] = "float32"
    numerics: Literal["native", "exact"] = "native"

    @property
    def chunk(self) -> int:
        """The tokens per call of the prefill graph."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        parts = -(-self.tokens_per_frame // LARGEST_CHUNK)
        return max(SMALLEST_CHUNK, -(-self.tokens_per_frame // parts))

    def __init__(self, **data: Any) -> None:
        """Set what offload "all" implies where it is left open."""
        offload = data.get("offload")
        super().__init__(**(_WHOLE_STEP | data if isinstance(offload, str) and offload == "all" else data))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens_per_frame >= self.max_seq_len:
            what = f"tokens_per_frame ({self.tokens_per_frame}) is not smaller than max_seq_len ({self.max_seq_len})"
            hint = "lower tokens_per_frame to the tokens of one frame, or raise max_seq_len to at least two frames "
            hint += f"({2 * self.tokens_per_frame})"
            raise CompileError(f"{what}: no token would have a previous frame to replay", hint=hint)
        CompileError.raise_all(self._not_a_whole_step())
        if isinstance(front := self.wavefront, Wavefront):
            found = front.problems(self.tokens_per_frame, self.rows, self.sparse_attention is not None)
            CompileError.raise_all([CompileError(p.what, where="wavefront", hint=p.hint) for p in found])
        if isinstance(guesses := self.jacobi, Jacobi):
            found = guesses.problems(self.tokens_per_frame, self.rows)
            if self.wavefront is not None:
                found.append(InputError("a wavefront and Jacobi decoding are given", hint="give one of them"))
            CompileError.raise_all([CompileError(p.what, where="jacobi", hint=p.hint) for p in found])
        if self.numerics == "exact" and not (quant_format(self.quant).integer and self.kv == "int8"):
            what = f"numerics='exact' is defined for integers, not for quant={self.quant!r} and kv={self.kv!r}"
            hint = "use quant='w8a8' or quant='w4a8' with kv='int8', or numerics='native'"
            raise CompileError(what, hint=hint)
        if self.batch_size * (self.rows or 1) > 32:
            what = f"batch_size {self.batch_size} and rows {self.rows} are {self.batch_size * (self.rows or 1)} rows"
            raise CompileError(what, hint="a decode step has at most 32 (the width of the DRS Index Register)")
        if self.replay is not None and self.replay.couple_cfg and self.batch_size % 2:
            what = f"couple_cfg pairs row b with row b + batch_size / 2, but batch_size is {self.batch_size}"
            hint = "use an even batch_size, or couple_cfg=False"
            raise CompileError(what, hint=hint)
        return self

    def _not_a_whole_step(self) -> list[CompileError]:
        """Return why offload "all" is not possible with the other options."""
        if self.offload != "all":
            return []
        found = [
            CompileError(f"offload='all' needs {name}={wanted!r}, not {given!r}", hint=f"leave {name} out")
            for name, wanted in _WHOLE_STEP.items()
            if (given := getattr(self, name)) != wanted
        ]
        if not quant_format(self.quant).integer:
            what = f"offload='all' needs integer weights, not quant={self.quant!r}"
            found.append(CompileError(what, hint=f"use {' or '.join(f'quant={name!r}' for name in ACCELERATED)}"))
        return found
