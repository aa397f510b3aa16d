"""manifest.json: the typed sections of an artifact, and the checksum of every other file."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import prod
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fastcar_compile.artifact import sections
from fastcar_compile.artifact.accelerator_section import AcceleratorSection
from fastcar_compile.artifact.digest import FileEntry
from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.config import CompileConfig
from fastcar_compile.config.formats import KV_TYPES
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import ArtifactError, describe_validation
from fastcar_compile.gates.weights import DIGEST
from fastcar_compile.ir.types import DecoderConfig, LayerSite, StateRole
from fastcar_compile.support import limits
from fastcar_compile.support.packages import NAME, release, versions

SCHEMA_VERSION = 5
"""Version of the manifest's own fields; sections have versions of their own."""

CHECKSUM = "checksum"
"""Field of manifest.json that the typed form does not have."""

_PRODUCERS = {"torch": "torch", "tvm": "apache-tvm", "onnx": "onnx", "onnxruntime": "onnxruntime", "numpy": "numpy"}

S = TypeVar("S", bound=sections.Section)

_STATED = {"replay": {"gate", "threshold"}, "sparse_attention": {"sinks", "window", "positions"}}
"""Options whose fields a manifest states, although `compile` has defaults for them."""


class Sections(BaseModel):
    """The sections that the compiler writes about an artifact.

    Args:
        options: the options of `compile`. target: the board, or the CPU.
        accelerator: None for a CPU target, and for formats that the kernels do not compute.
        thresholds: calibrated thresholds; None: the compiled thresholds hold.
        extensions: sections of emitters from other packages, by the emitter's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: CompileConfig
    target: Target
    decoder: sections.DecoderSection
    layers: sections.LayersSection
    pipeline: sections.PipelineSection
    host: sections.HostSection
    onnx: sections.OnnxSection | None = None
    accelerator: AcceleratorSection | None = None
    thresholds: Thresholds | None = None
    extensions: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def thresholds_in_use(self) -> Sequence[float | None]:
        """The threshold of every layer that sessions begin with: the calibrated one, else the compiled one."""
        return self.layers.thresholds if self.thresholds is None else self.thresholds.values

    @field_validator("options", mode="before")
    @classmethod
    def _stated(cls, options: Any) -> Any:
        """Check that a manifest states every option that a caller may leave open, and names weights by their digest."""
        if not isinstance(options, dict):
            return options
        given = cast("dict[str, Any]", options)
        parts = {name: cast("dict[str, Any]", part) for name, part in given.items() if isinstance(part, dict)}
        for name, needed in _STATED.items():
            if lacking := sorted(needed - set(parts.get(name, needed))):
                raise ValueError(f"{name} lacks {', '.join(lacking)}")
        # A caller may give a file of weights, but a file that a manifest names would be read.
        for name in ("gate_weights", "draft"):
            weights = parts.get("replay", {}).get(name)
            if isinstance(weights, str) and not DIGEST.fullmatch(weights):
                raise ValueError(f"replay.{name} is not a digest")
        return given

    def extension(self, name: str, kind: type[S]) -> S | None:
        """Return the section of an emitter from another package; None: the artifact has no section of this name.

        Raises:
            ArtifactError: the section does not fit its type.
        """
        if name not in self.extensions:
            return None
        try:
            return kind.model_validate(self.extensions[name])
        except ValidationError as error:
            text = describe_validation(error)
            raise ArtifactError(f"the manifest's section {name} has bad fields: {text}") from error


class Manifest(Sections):
    """The content of manifest.json.

    Args:
        schema_version: layout of the artifact; only `SCHEMA_VERSION` can be read.
        producer: versions of the packages that wrote the artifact.
        files: POSIX path relative to the artifact -> checksum and size; every file but manifest.json itself.
    """

    schema_version: int = Field(default=SCHEMA_VERSION, strict=True)
    producer: dict[str, str]
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """Return deterministic JSON: sorted keys, two spaces, UTF-8, one newline at the end, and the checksum."""
        return sealed(self.model_dump(mode="json"))


def _canonical(data: Any) -> bytes:
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8")


def sealed(data: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest.json of these fields, with a checksum of all other fields.

    The checksum finds damage. Whoever changes a manifest on purpose can write the checksum anew; a digest or a
    signature finds a change on purpose.
    """
    fields = {name: value for name, value in data.items() if name != CHECKSUM}
    return _canonical(fields | {CHECKSUM: hashlib.sha256(_canonical(fields)).hexdigest()})


def producer_versions() -> dict[str, str]:
    """Return the versions of this package and of the packages that it builds on; "none" where one is not installed."""
    found = versions(*_PRODUCERS.values())
    return {"python": found["python"], NAME: release()} | {name: found[own] for name, own in _PRODUCERS.items()}


# Checks that the sections agree with each other; the type of a section checks it alone.


_PAST = {
    StateRole.MLP_CACHE: ("tokens_per_frame", "batch_size", "hidden_size"),
    StateRole.GATE_CACHE: ("tokens_per_frame", "batch_size"),
    StateRole.CHAIN_COUNT: ("tokens_per_frame", "batch_size"),
}
"""State of replay: the sizes that its first dimensions have."""

_MOST_STATE = 1 << 40
"""Bytes of all states: 1 TiB."""


def inconsistencies(manifest: Manifest) -> list[str]:
    """Return the contradictions and the impossible sizes of a manifest."""
    problems = list(_sizes(manifest.decoder.config))
    if problems:
        return problems  # the other checks rely on the sizes
    checks = (_options, _layers, _state, _thresholds)
    return [problem for check in checks for problem in check(manifest)]


def _sizes(config: DecoderConfig) -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        least = 0 if field.name == "prefill_chunk" else 1
        if type(value) is int and not least <= value <= limits.SIZE:
            yield f"decoder.config.{field.name} is {value}, not {least} to {limits.SIZE}"
    if config.num_layers > limits.LAYERS:
        yield f"decoder.config.num_layers is {config.num_layers}, more than {limits.LAYERS}"
    if config.prefill_chunk > config.max_seq_len:
        yield f"decoder.config.prefill_chunk is {config.prefill_chunk}, max_seq_len is {config.max_seq_len}"
    # An embedding row has float32 values, a token is one int64.
    row = 4 * math.prod(config.input_shape) if config.takes_embeddings else 8
    if config.batch_size * config.prefill_chunk * row > limits.ARRAYS_BYTES:
        yield "the input of a prefill call is larger than 1 GiB"
    ring = config.ring
    if ring is not None and not (0 <= ring.sinks <= limits.SIZE and 1 <= ring.window <= ring.rows <= limits.SIZE):
        yield "decoder.config.ring has sizes that no ring has"


def _options(manifest: Manifest) -> Iterator[str]:
    options, config = manifest.options, manifest.decoder.config
    for name in ("batch_size", "max_seq_len", "tokens_per_frame", "rows"):
        if getattr(options, name) != getattr(config, name):
            yield f"options.{name} is {getattr(options, name)}, decoder.config.{name} {getattr(config, name)}"
    if (options.sparse_attention is None) != (config.ring is None):
        yield "options.sparse_attention and decoder.config.ring are not both there"
    if options.replay is None and any(layer.replay is not None for layer in manifest.layers.layers):
        yield "layers replay, but options.replay is null"


def _layers(manifest: Manifest) -> Iterator[str]:
    layers, config = manifest.layers.layers, manifest.decoder.config
    if [layer.layer for layer in layers] != list(range(config.num_layers)):
        yield f"layers are not those from 0 to {config.num_layers - 1}, in order"
    for layer in layers:
        for role in (StateRole.KEY_CACHE, StateRole.VALUE_CACHE):
            found = [s for s in manifest.decoder.state if (s.role, s.layer) == (role, layer.layer)]
            if len(found) == 1:
                yield from _cache(config, manifest.options.kv, layer, found[0])
            else:
                yield f"layer {layer.layer} has {len(found)} states that are its {role}"


def _cache(config: DecoderConfig, kv: str, layer: LayerSite, state: sections.State) -> Iterator[str]:
    """Check keys or values: [B, Hkv, rows, elements of a row]."""
    attention = layer.attention
    row = KV_TYPES[kv].row_size(attention.head_dim)
    expected = (config.batch_size, attention.num_kv_heads, attention.cache_rows, row)
    if (state.shape, state.dtype) != (expected, kv):
        yield f"state {state.name} is {state.dtype}{list(state.shape)}, layer {layer.layer} says {kv}{list(expected)}"
    seen = config.max_seq_len if attention.window is None else attention.sinks + attention.window
    if attention.cache_rows < min(config.max_seq_len, seen):
        yield f"state {state.name} has {attention.cache_rows} rows, max_seq_len is {config.max_seq_len}"
    sinks = None if attention.window is None else attention.sinks
    # A cache of all positions may be a ring: it never wraps.
    if state.sinks != sinks and (state.sinks is not None or attention.cache_rows < config.max_seq_len):
        yield f"state {state.name} keeps {state.sinks} sinks, layer {layer.layer} says {sinks}"
    if attention.num_kv_heads < 1 or attention.num_heads % attention.num_kv_heads:
        yield f"layer {layer.layer}: {attention.num_heads} query heads for {attention.num_kv_heads} key heads"


def _state(manifest: Manifest) -> Iterator[str]:
    config, states = manifest.decoder.config, manifest.decoder.state
    names = Counter(state.name for state in states)
    yield from (f"two states have the name {name!r}" for name in sorted(names) if names[name] > 1)
    for state in states:
        if not all(0 < size <= limits.SIZE for size in state.shape):
            yield f"state {state.name} has the impossible shape {list(state.shape)}"
        if not 0 <= state.layer < config.num_layers:
            yield f"state {state.name} is of layer {state.layer} of {config.num_layers}"
        past = tuple(getattr(config, name) for name in _PAST.get(state.role, ()))
        if state.role in _PAST and (state.shape[: len(past)] != past or len(state.shape) > 3):
            yield f"state {state.name} has shape {list(state.shape)}, the decoder's sizes are {list(past)}"
    if sum(state.format.itemsize * prod(state.shape) for state in states) > _MOST_STATE:
        yield "the states are larger than any machine's memory"


def _thresholds(manifest: Manifest) -> Iterator[str]:
    gates = {gate for gate in manifest.layers.gates if gate is not None}
    if len(gates) > 1:
        yield f"layers have several gates: {', '.join(sorted(gates))}"
    if manifest.options.replay is not None and gates - {manifest.options.replay.gate}:
        yield f"layers have gate {', '.join(sorted(gates))}, options.replay.gate is {manifest.options.replay.gate}"
    if manifest.thresholds is not None:
        try:
            manifest.thresholds.check(manifest.layers.gates, "")
        except ArtifactError as error:
            yield error.what
