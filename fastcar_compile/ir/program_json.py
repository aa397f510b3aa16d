"""A DecoderProgram as JSON: graph files that hold all of it but the weights, and sections of a manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fastcar_compile import limits
from fastcar_compile.artifact.layout import GRAPH_AFTER
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection, LayerPart, LayersSection, State
from fastcar_compile.errors import ArtifactError, describe_validation
from fastcar_compile.ir.graph_json import Json, graph_from_json, graph_to_json
from fastcar_compile.ir.program import DecoderConfig, DecoderProgram, StateSpec
from fastcar_compile.ir.tensors import dtype_name, to_torch, torch_dtype
from fastcar_compile.strict_json import read_json

_HINT = "compile the model again, or write the file again with `fastcar opt -o NAME.json`"
_CONFIG = TypeAdapter(DecoderConfig)
_STATE = TypeAdapter(State)


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
        states = [_STATE.validate_python(each) for each in data]
    except (ValidationError, TypeError) as error:
        text = "; ".join(describe_validation(error)) if isinstance(error, ValidationError) else str(error)
        raise ArtifactError(f"the state section is malformed: {text}", hint=_HINT) from error
    return [StateSpec(s.name, s.shape, torch_dtype(s.dtype), s.role, s.layer) for s in states]


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


def config_from_json(data: object) -> DecoderConfig:
    """Return the decoder's sizes.

    Raises:
        ArtifactError: the data is malformed.
    """
    try:
        return _CONFIG.validate_python(data)
    except ValidationError as error:
        text = "; ".join(describe_validation(error))
        raise ArtifactError(f"the decoder section is malformed: {text}", hint=_HINT) from error


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
        raise ArtifactError(f"the graph file lacks {error}", hint=_HINT) from error
    except TypeError as error:
        raise ArtifactError(f"the graph file is malformed: {error}", hint=_HINT) from error


def read_graph_file(path: Path, params: Mapping[str, Tensor], *, missing_on_meta: bool = False) -> DecoderProgram:
    """Return the program of a graph file on disk.

    Raises:
        ArtifactError: there is no such file, or it is malformed.
    """
    data: object = read_json(path, "graph file", ArtifactError, size=limits.GRAPH_BYTES, hint=_HINT)
    if not isinstance(data, dict):
        raise ArtifactError("the graph file holds no JSON object", where=str(path), hint=_HINT)
    try:
        return program_from_json(cast("Json", data), params, missing_on_meta=missing_on_meta)
    # The error of a part does not know the file, so the path is put into it here.
    except ArtifactError as error:
        raise ArtifactError(error.what, where=error.where or str(path), hint=error.hint or _HINT) from error


def graph_file_text(program: DecoderProgram) -> str:
    """Return the text of a graph file. People have the listing; with an indent Python's slow encoder would write it."""
    return json.dumps(program_to_json(program), sort_keys=True) + "\n"
