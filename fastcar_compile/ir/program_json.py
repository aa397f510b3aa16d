"""A DecoderProgram as JSON: graph files that hold all of it but the weights, and sections of a manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fastcar_compile.artifact.layout import GRAPH_AFTER
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection, LayerPart, LayersSection, State
from fastcar_compile.errors import ArtifactError
from fastcar_compile.ir.graph_json import Json, graph_from_json, graph_to_json
from fastcar_compile.ir.program import DecoderConfig, DecoderProgram, StateRole, StateSpec
from fastcar_compile.ir.tensors import dtype_name, to_torch, torch_dtype

_CONFIG = TypeAdapter(DecoderConfig)


def state_to_json(state: Iterable[StateSpec]) -> list[Json]:
    """Return names, shapes, dtypes and roles."""
    return [
        {"name": s.name, "shape": list(s.shape), "dtype": dtype_name(s.dtype), "role": str(s.role), "layer": s.layer}
        for s in state
    ]


def state_from_json(data: list[Json]) -> list[StateSpec]:
    """Return the inverse of `state_to_json`.

    Raises:
        ArtifactError: the data is malformed.
    """
    try:
        return [
            StateSpec(d["name"], tuple(d["shape"]), torch_dtype(d["dtype"]), StateRole(d["role"]), d["layer"])
            for d in data
        ]
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise ArtifactError(f"the state section is malformed: {error}") from error


def decoder_section(program: DecoderProgram) -> DecoderSection:
    """Return sizes, state, inputs and outputs of a program, for a manifest."""
    return DecoderSection(
        config=program.config,
        state=tuple(
            State(name=s.name, shape=s.shape, dtype=dtype_name(s.dtype), role=s.role, layer=s.layer)
            for s in program.state
        ),
        inputs=tuple(program.inputs),
        outputs=tuple(program.outputs),
        prefill_outputs=tuple(program.prefill_outputs),
        context_outputs=tuple(program.context_outputs),
        weight_bytes=program.params.nbytes(),
    )


def layers_section(program: DecoderProgram) -> LayersSection:
    """Return where every layer is and what replay was inserted, for a manifest."""
    return LayersSection(layers=tuple(LayerPart.model_validate(dataclasses.asdict(s)) for s in program.sites))


def read_params(artifact: StoredArtifact) -> dict[str, Tensor]:
    """Return every parameter of an artifact's rewritten graph, over memory maps of the weight files."""
    return {name: to_torch(array) for name, array in artifact.arrays().items()}


def read_program(artifact: StoredArtifact) -> DecoderProgram:
    """Return the rewritten program of an artifact.

    Raises:
        ArtifactError: the graph cannot be read.
    """
    return program_from_json(artifact.json(GRAPH_AFTER), read_params(artifact))


def config_from_json(data: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder's sizes.

    Raises:
        ArtifactError: the data is malformed.
    """
    try:
        return _CONFIG.validate_python(dict(data))
    except ValidationError as error:
        raise ArtifactError(f"the decoder section is malformed: {error}") from error


def program_to_json(program: DecoderProgram) -> Json:
    """Return the whole program but the values of its parameters: what a graph file holds."""
    prefill, context = program.prefill, program.context
    return {
        "decode": graph_to_json(program.graph_module),
        "prefill": None if prefill is None else graph_to_json(prefill),
        "context": None if context is None else graph_to_json(context),
        "config": dataclasses.asdict(program.config),
        "state": state_to_json(program.state),
        "outputs": list(program.outputs),
        "prefill_outputs": list(program.prefill_outputs),
        "context_outputs": list(program.context_outputs),
    }


def program_from_json(
    data: Mapping[str, Any], params: Mapping[str, Tensor], *, missing_on_meta: bool = False
) -> DecoderProgram:
    """Return the program of a graph file.

    Args:
        missing_on_meta: a parameter that `params` lacks becomes a tensor on the meta device, without a value.

    Raises:
        ArtifactError: a part is missing or malformed.
    """
    try:
        prefill, context = data["prefill"], data["context"]
        decode = graph_from_json(data["decode"], params, missing_on_meta=missing_on_meta)
        return DecoderProgram(
            decode,
            None if prefill is None else graph_from_json(prefill, params, missing_on_meta=missing_on_meta),
            config_from_json(data["config"]),
            state=state_from_json(data["state"]),
            outputs=list(data["outputs"]),
            prefill_outputs=list(data["prefill_outputs"]),
            context=None if context is None else graph_from_json(context, params, missing_on_meta=missing_on_meta),
            context_outputs=list(data["context_outputs"]),
        )
    except KeyError as error:
        raise ArtifactError(f"the graph file lacks {error}") from error


def read_graph_file(path: Path, params: Mapping[str, Tensor], *, missing_on_meta: bool = False) -> DecoderProgram:
    """Return the program of a graph file on disk.

    Raises:
        ArtifactError: there is no such file, or it is malformed.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"the graph file cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise ArtifactError(f"the graph file is no JSON: {error}", where=str(path)) from error
    if not isinstance(data, dict):
        raise ArtifactError("the graph file holds no JSON object", where=str(path))
    return program_from_json(cast("Json", data), params, missing_on_meta=missing_on_meta)


def graph_file_text(program: DecoderProgram) -> str:
    """Return the text of a graph file. People have the listing; with an indent Python's slow encoder would write it."""
    return json.dumps(program_to_json(program), sort_keys=True) + "\n"
