"""A DecoderProgram as JSON sections of a manifest plus graph files, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fastcar_compile.errors import ArtifactError
from fastcar_compile.ir.graph_json import graph_from_json, graph_to_json
from fastcar_compile.ir.program import DecoderConfig, DecoderProgram, LayerSite, StateRole, StateSpec

_SITES = TypeAdapter(list[LayerSite])
_CONFIG = TypeAdapter(DecoderConfig)


def state_to_json(state: list[StateSpec]) -> list[dict[str, Any]]:
    """Names, shapes, dtypes and roles."""
    return [
        {"name": s.name, "shape": list(s.shape), "dtype": _dtype_name(s.dtype), "role": str(s.role), "layer": s.layer}
        for s in state
    ]


def state_from_json(data: list[dict[str, Any]]) -> list[StateSpec]:
    """The inverse of `state_to_json`. Raises ArtifactError on malformed data."""
    try:
        return [
            StateSpec(d["name"], tuple(d["shape"]), getattr(torch, d["dtype"]), StateRole(d["role"]), d["layer"])
            for d in data
        ]
    except (KeyError, ValueError, AttributeError) as error:
        raise ArtifactError(f"the manifest's state section is malformed: {error}") from error


def program_sections(program: DecoderProgram) -> dict[str, Any]:
    """JSON of everything but graphs and tensors; infinities are strings."""
    return {
        "decoder": dataclasses.asdict(program.config),
        "state": state_to_json(program.state),
        "inputs": program.inputs,
        "outputs": program.outputs,
        "prefill_outputs": program.prefill_outputs,
        "sites": [_plain_site(s) for s in program.sites],
    }


def config_from_json(data: Mapping[str, Any]) -> DecoderConfig:
    """The decoder's sizes. Raises ArtifactError on malformed data."""
    try:
        return _CONFIG.validate_python(dict(data))
    except ValidationError as error:
        raise ArtifactError(f"the manifest's decoder section is malformed: {error}") from error


def sites_from_json(data: list[dict[str, Any]]) -> list[LayerSite]:
    """The layer sites. Raises ArtifactError on malformed data."""
    try:
        return _SITES.validate_python(data)
    except ValidationError as error:
        raise ArtifactError(f"the manifest's sites section is malformed: {error}") from error


def graphs_to_json(program: DecoderProgram) -> dict[str, Any]:
    """The decode step and the prefill chunk."""
    prefill = program.prefill
    return {
        "decode": graph_to_json(program.graph_module),
        "prefill": None if prefill is None else graph_to_json(prefill),
    }


def program_from_json(
    sections: Mapping[str, Any], graphs: Mapping[str, Any], params: Mapping[str, Tensor]
) -> DecoderProgram:
    """The program of an artifact.

    Raises:
        ArtifactError: a section is missing or malformed.
    """
    try:
        prefill = graphs["prefill"]
        return DecoderProgram(
            graph_from_json(graphs["decode"], params),
            None if prefill is None else graph_from_json(prefill, params),
            config_from_json(sections["decoder"]),
            state=state_from_json(sections["state"]),
            outputs=list(sections["outputs"]),
            prefill_outputs=list(sections["prefill_outputs"]),
            sites=sites_from_json(sections["sites"]),
        )
    except KeyError as error:
        raise ArtifactError(f"the artifact lacks the section {error}") from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_site(site: LayerSite) -> dict[str, Any]:
    data = dataclasses.asdict(site)
    threshold = data["threshold"]
    if threshold is not None and math.isinf(threshold):
        data["threshold"] = str(threshold)
    return data
