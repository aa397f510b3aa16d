"""The accelerator parts of an artifact: HLS project, packed weights and the DRS control table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.layout import (
    ACCELERATOR_WEIGHTS,
    DRS_TABLE,
    DRS_TABLE_JSON,
    HLS,
    STEP_PROGRAM,
    STEP_PROGRAM_JSON,
)
from fastcar_compile.artifact.offload import CONSTANTS, NETWORK
from fastcar_compile.artifact.sections.accelerator import (
    AcceleratorSection,
    HostLinearPart,
    KernelPart,
    LinearCallPart,
    StepPart,
)
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.base import EmitContext
from fastcar_compile.codegen.hls.control import controller_part, network_stream, networks_of
from fastcar_compile.codegen.hls.control_table.gate import network_words
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import WORD_BYTES
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import step_interface
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_linear, pack_mlp
from fastcar_compile.codegen.hls.plan import AcceleratorPlan, plan_accelerator, require_memory
from fastcar_compile.codegen.hls.project import emit_hls, emit_step
from fastcar_compile.codegen.hls.step_plan import StepSources, step_sources
from fastcar_compile.codegen.hls.step_program.instructions import AppendKeys, AppendValues, Decide, Instruction, Replay
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.config.formats import DTYPES, quant_format
from fastcar_compile.errors import InternalError
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.sites import LayerSite
from fastcar_compile.ir.tensor_files import LazyStreams, TensorSpec
from fastcar_compile.ir.types import StateRole
from fastcar_compile.passes.patterns.linear_calls import LinearCall

# The files of a whole decode step: its weights and constants, one tensor per argument, and the step program.


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


Stream = Callable[[], NDArray[np.uint8]]
"""Packs a weight stream."""


class HlsEmitter:
    """Writes the HLS project, the DRS control table and the accelerator's weight streams of an FPGA target."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> AcceleratorSection | None:
        """Write the files; see Emitter.emit."""
        if context.target.kind != "fpga":
            return None
        context.say("writing the HLS project and the DRS table")
        return emit_accelerator(program, context)


def emit_accelerator(program: DecoderProgram, context: EmitContext) -> AcceleratorSection | None:
    """Write hls/, drs/, step/ for whole steps, and weights/accelerator.safetensors; return the manifest's section.

    Raises:
        CompileError: kernel or decoder does not fit the board, there is no kernel for a shape, or no step program.
    """
    writer, config, board = context.writer, context.options, context.target
    if not quant_format(config.quant).accelerated:
        text = f"target {board.name} gets no accelerator kernels: they are int8, and quant is {config.quant!r}"
        warnings.warn(text, UserWarning, stacklevel=2)
        return None
    require_memory(program, config, board)
    plan = plan_accelerator(program, config, board)
    step, kernels = _emit_project(program, context, plan)
    writer.write_bytes(DRS_TABLE, plan.table.to_bytes())
    writer.write_text(DRS_TABLE_JSON, json.dumps(plan.table.to_json(), sort_keys=True, indent=1) + "\n")
    return AcceleratorSection(
        offload=config.offload,
        weights=ACCELERATOR_WEIGHTS,
        table=DRS_TABLE,
        controller=controller_part(plan.table),
        design=plan.design.part,
        exploration=plan.found.part,
        kernels=kernels,
        linears=tuple(LinearCallPart(**call.to_json()) for call in plan.calls),
        on_host=tuple(HostLinearPart(**asdict(linear)) for linear in plan.kept),
        step=step,
    )


def _emit_project(
    program: DecoderProgram, context: EmitContext, plan: AcceleratorPlan
) -> tuple[StepPart | None, tuple[KernelPart, ...]]:
    """Write the kernels and their weights; return the step, where they run whole ones, and the kernels."""
    writer, board = context.writer, context.target
    streams, folder = weight_streams(program, plan), writer.root / HLS
    if context.options.offload != "all":
        streams |= _network_streams(program, plan.design)
        emit_hls(plan.design, folder, plan.table, board=board)
        writer.write_streamed(ACCELERATOR_WEIGHTS, streams, LazyStreams(streams))
        return None, tuple(interface.part for interface in plan.kernels)
    sources = step_sources(program, plan)
    design = StepDesign.of(sources.program, plan.found.group)
    kernel = step_interface(plan.design, design, plan.table).part
    emit_step(plan.design, design, plan.table, folder, board=board)
    return write_step(writer, sources, kernel, streams, program.state), (kernel,)


def weight_streams(program: DecoderProgram, plan: AcceleratorPlan) -> dict[str, tuple[int, Stream]]:
    """Return the weight streams of the array by name: their bytes, and what packs them."""
    design = plan.design
    streams: dict[str, tuple[int, Stream]] = {
        f"layer_{s.layer}": (design.stream_bytes, partial(_mlp_stream, program, s, design)) for s in program.sites
    }
    for call in plan.calls:
        product = design.linears[call.name]
        streams[call.name] = (product.stream_bytes, partial(_linear_stream, program, call, design))
    return streams


def _network_streams(program: DecoderProgram, design: Design) -> dict[str, tuple[int, Stream]]:
    """Return the networks of the gates in the same form."""
    return {
        f"{NETWORK}{layer}": (
            network_words(weights.units, design.mlp.hidden) * WORD_BYTES,
            partial(network_stream, weights),
        )
        for layer, weights in networks_of(program).items()
    }


def _mlp_stream(program: DecoderProgram, site: LayerSite, design: Design) -> NDArray[np.uint8]:
    """Return the kernel's weight stream of one layer, uint8."""
    return pack_mlp(linear_weights(program, site.mlp.weights, site.mlp.biases), design)


def _linear_stream(program: DecoderProgram, call: LinearCall, design: Design) -> NDArray[np.uint8]:
    """Return the kernel's weight stream of one linear call, uint8."""
    return pack_linear(linear_weights(program, call.weights, call.biases), design.linears[call.name], design.axi_words)


def linear_weights(program: DecoderProgram, names: Sequence[str], biases: Sequence[str | None]) -> list[LinearWeights]:
    """Return quantised linears by the names that their weights had before; int4 packed, as the parameters are."""
    params, linears = program.params, []
    for name, bias in zip(names, biases, strict=True):
        values = params[f"{name}_int4" if f"{name}_int4" in params else f"{name}_int8"]
        scales = params[f"{name}_scale"].numpy()
        linears.append(LinearWeights(values.numpy(), scales, None if bias is None else params[bias].float().numpy()))
    return linears
