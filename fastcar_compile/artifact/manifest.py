"""manifest.json: the typed sections of an artifact, and the checksum of every other file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator

from fastcar_compile.artifact.digest import FileEntry
from fastcar_compile.artifact.sections import (
    AcceleratorSection,
    DecoderSection,
    HostSection,
    LayersSection,
    OnnxSection,
    PipelineSection,
    Section,
)
from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.config import CompileConfig, describe_validation
from fastcar_compile.config.targets.model import Target
from fastcar_compile.errors import ArtifactError
from fastcar_compile.gates.weights import DIGEST
from fastcar_compile.support.packages import NAME, release

SCHEMA_VERSION = 5
"""Version of the manifest's own fields; sections have versions of their own."""

CHECKSUM = "checksum"
"""Field of manifest.json that the typed form does not have."""

_PRODUCERS = {
    "torch": "torch",
    "tvm": "apache-tvm",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "numpy": "numpy",
}

S = TypeVar("S", bound=Section)


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
    decoder: DecoderSection
    layers: LayersSection
    pipeline: PipelineSection
    host: HostSection
    onnx: OnnxSection | None = None
    accelerator: AcceleratorSection | None = None
    thresholds: Thresholds | None = None
    extensions: dict[str, dict[str, Any]] = Field(default_factory=dict)

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
        weights = parts.get("replay", {}).get("gate_weights")
        if isinstance(weights, str) and not DIGEST.fullmatch(weights):
            raise ValueError("replay.gate_weights is not a digest")
        return given

    @field_serializer("options")
    def _options(self, options: CompileConfig) -> dict[str, Any]:
        return options.to_json()

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
            text = "; ".join(describe_validation(error))
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
    versions = {"python": platform.python_version(), NAME: release()}
    for name, distribution in _PRODUCERS.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions
