"""The files of a whole decode step: its weights and constants, one tensor per argument, and the step program."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.layout import ACCELERATOR_WEIGHTS, STEP_PROGRAM, STEP_PROGRAM_JSON
from fastcar_compile.artifact.offload import CONSTANTS
from fastcar_compile.artifact.sections.accelerator import KernelPart, StepPart
from fastcar_compile.artifact.tensor_files import TensorSpec
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.hls.step_plan import StepSources
from fastcar_compile.errors import InternalError
from fastcar_compile.formats.dtypes import DTYPES
from fastcar_compile.ir.program import StateRole, StateSpec
from fastcar_compile.step.instructions import AppendKeys, AppendValues, Decide, Instruction, Replay
from fastcar_compile.step.program import StepProgram

Streams = Mapping[str, tuple[int, Callable[[], NDArray[np.uint8]]]]
"""Name of a weight stream -> its bytes on all ports, and what packs it."""


def write_step(
    writer: ArtifactWriter, sources: StepSources, kernel: KernelPart, streams: Streams, state: list[StateSpec]
) -> StepPart:
    """Write weights, constants and the step program; return what the manifest says of the step.

    Args:
        kernel: whose arguments take the weights. state: of the decoder.
    """
    ports = kernel.weights()
    section, rest = divmod(sum(streams[name][0] for name in sources.streams), len(ports))
    if rest:
        raise InternalError(f"weight streams do not divide into {len(ports)} ports")
    specs = {port: TensorSpec(DTYPES["uint8"], (section,)) for port in ports}
    specs[CONSTANTS] = TensorSpec(DTYPES["float32"], sources.constants.shape)
    writer.write_pieces(ACCELERATOR_WEIGHTS, specs, _pieces(sources, ports, streams))
    program = sources.program
    writer.write_bytes(STEP_PROGRAM, program.to_bytes())
    writer.write_text(STEP_PROGRAM_JSON, json.dumps(program.to_json(), sort_keys=True, indent=1) + "\n")
    return StepPart(program=STEP_PROGRAM, instructions=len(program.instructions), states=state_places(program, state))


def _pieces(sources: StepSources, ports: list[str], streams: Streams) -> Iterator[tuple[str, int, memoryview]]:
    """Yield the parts of every stream, which follow each other on each port; one stream is in memory at a time."""
    at = 0
    for name in sources.streams:
        parts = streams[name][1]().reshape(len(ports), -1)
        for port, part in zip(ports, parts, strict=True):
            yield port, at, part.data
        at += parts.shape[1]
    yield CONSTANTS, 0, _bytes(sources.constants).data


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1)


def state_places(program: StepProgram, state: list[StateSpec]) -> dict[str, int]:
    """Return the first memory word of every state, by its name; see StepPart.

    Raises:
        InternalError: the program keeps a state nowhere.
    """
    places: dict[tuple[StateRole, int], int] = {}
    for instruction in program.instructions:
        places |= {(role, instruction.layer): word for role, word in _kept(instruction).items()}
    if lacking := [s.name for s in state if (s.role, s.layer) not in places]:
        raise InternalError(f"the step program has no place for {', '.join(lacking)}")
    return {s.name: places[s.role, s.layer] for s in state}


def _kept(instruction: Instruction) -> dict[StateRole, int]:
    """Return the first words of what an instruction keeps from step to step."""
    match instruction:
        case AppendKeys():
            return {StateRole.KEY_CACHE: instruction.cache}
        case AppendValues():
            return {StateRole.VALUE_CACHE: instruction.cache}
        case Decide():
            inputs = {StateRole.GATE_CACHE: instruction.inputs} if instruction.gate.reads_input else {}
            return {StateRole.CHAIN_COUNT: instruction.chain, **inputs}
        case Replay():
            return {StateRole.MLP_CACHE: instruction.cache}
        case _:
            return {}
