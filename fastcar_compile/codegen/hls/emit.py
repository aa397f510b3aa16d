"""The accelerator parts of an artifact: HLS project, packed weights and the DRS control table."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.accelerator_section import AcceleratorSection, HostLinearPart, LinearCallPart, StepPart
from fastcar_compile.artifact.cache import Kind
from fastcar_compile.artifact.engine import DraftProducts
from fastcar_compile.artifact.layout import ACCELERATOR_WEIGHTS, CONSTANTS, DRS_TABLE, DRS_TABLE_JSON, HLS
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.emit import EmitContext
from fastcar_compile.codegen.hls.accelerator import Accelerator
from fastcar_compile.codegen.hls.control import controller_part
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_draft, pack_linear, pack_mlp
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.config.formats import DTYPES
from fastcar_compile.errors import InternalError
from fastcar_compile.gates.draft import PARTS
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.tensor_files import TensorSpec, octets
from fastcar_compile.ir.types import MlpSite
from fastcar_compile.passes.offload import LinearCall

Stream = Callable[[], NDArray[np.uint8]]
"""Packs a weight stream."""

Streams = Mapping[str, tuple[int, Stream]]
"""Name of a weight stream -> its bytes on all ports, and what packs it."""


def write_weights(
    writer: ArtifactWriter, plan: Accelerator, streams: Streams, constants: NDArray[Any], origins: object = None
) -> None:
    """Write weights and constants (float32 words) of the kernel, a tensor per argument.

    Args:
        origins: what decides the weights that the streams are packed from, as JSON; None: that is not known.
    """
    ports, order = plan.kernels[-1].part.weights(), plan.streams
    section, rest = divmod(sum(streams[name][0] for name in order), len(ports))
    if rest:
        raise InternalError(f"weight streams do not divide into {len(ports)} ports")
    specs = {port: TensorSpec(DTYPES["uint8"], (section,)) for port in ports}
    if constants.size:
        specs[CONSTANTS] = TensorSpec(DTYPES["float32"], constants.shape)
    inputs = None
    if origins is not None:
        packed = [plan.design, *plan.calls, *(() if plan.step is None else plan.step.drafts)]
        fixed = hashlib.sha256(octets(constants)).hexdigest()
        inputs = [origins, [*map(repr, packed)], [[name, streams[name][0]] for name in order], fixed]
    writer.write_pieces(ACCELERATOR_WEIGHTS, specs, _pieces(order, ports, streams, constants), inputs)


def write_table(writer: ArtifactWriter, plan: Accelerator) -> None:
    """Write the control table with its program, and its JSON twin."""
    writer.write_bytes(DRS_TABLE, plan.program.to_bytes(plan.table))
    listed = plan.table.to_json() | {"program": plan.program.to_json()}
    writer.write_text(DRS_TABLE_JSON, json.dumps(listed, sort_keys=True, indent=1) + "\n")


def _pieces(
    order: Sequence[str], ports: list[str], streams: Streams, constants: NDArray[Any]
) -> Iterator[tuple[str, int, memoryview]]:
    """Yield the parts of every stream, which follow each other on each port; one stream is in memory at a time."""
    at = 0
    for name in order:
        parts = streams[name][1]().reshape(len(ports), -1)
        for port, part in zip(ports, parts, strict=True):
            yield port, at, part.data
        at += parts.shape[1]
    if constants.size:
        yield CONSTANTS, 0, np.ascontiguousarray(constants, "<f4").view(np.uint8).reshape(-1).data


def state_places(program: StepProgram, state: list[StateSpec]) -> dict[str, int]:
    """Return the first memory word of every state, by its name; see StepPart.

    Raises:
        InternalError: the program keeps a state nowhere.
    """
    places = {(role, one.layer): word for one in program.instructions for role, word in one.states().items()}
    if lacking := [s.name for s in state if (s.role, s.layer) not in places]:
        raise InternalError(f"the step program has no place for {', '.join(lacking)}")
    return {s.name: places[s.role, s.layer] for s in state}


class HlsEmitter:
    """Writes the HLS project, the DRS control table and the accelerator's weight streams of an FPGA target."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> AcceleratorSection | None:
        """Write hls/, drs/ and weights/accelerator.safetensors; see Emitter.emit."""
        plan = context.plan.accelerator
        if plan is None:
            return None
        context.say("writing the HLS project and the DRS table")
        step = _emit_project(program, context, plan)
        return AcceleratorSection(
            offload=context.plan.config.offload,
            weights=ACCELERATOR_WEIGHTS,
            table=DRS_TABLE,
            controller=controller_part(plan.table),
            design=plan.design.part,
            exploration=plan.found.part,
            kernels=tuple(kernel.part for kernel in plan.kernels),
            linears=tuple(LinearCallPart.model_validate(call, from_attributes=True) for call in plan.calls),
            on_host=tuple(HostLinearPart.model_validate(linear, from_attributes=True) for linear in plan.kept),
            step=step,
        )


def _emit_project(program: DecoderProgram, context: EmitContext, plan: Accelerator) -> StepPart | None:
    """Write the kernel, its table and its weights; return the step, where it runs whole ones."""
    writer = context.writer

    def made(name: str, inputs: object, make: Callable[[Path], Any]) -> Any:
        return writer.made(Kind.LIBRARY, f"{HLS}/{name}", inputs, make)

    emit_hls(plan.design, writer.root / HLS, plan.table, context.plan.board, plan.kernel_design, made)
    # The weight files are written by now, so that their digests are those of the quantised weights.
    origins = None if writer.cache is None else program.params.origins(program.params, cache(writer.digests.of_path))
    if origins is not None:
        origins = [origins, [repr(site.mlp) for site in program.sites]]
    write_weights(writer, plan, weight_streams(program, plan), plan.constants(program), origins)
    write_table(context.writer, plan)
    if plan.step is None:
        return None
    places = state_places(plan.program, program.state)
    return StepPart(instructions=len(plan.program.instructions), states=places)


def weight_streams(program: DecoderProgram, plan: Accelerator) -> Streams:
    """Return the weight streams of the array by name: their bytes, and what packs them."""
    design = plan.design

    def stream(pack: Callable[[list[LinearWeights]], NDArray[np.uint8]], of: MlpSite | LinearCall) -> Stream:
        return lambda: pack(linear_weights(program, of.weights, of.biases))

    pack = partial(pack_mlp, design=design)
    streams = {f"layer_{s.layer}": (design.stream_bytes, stream(pack, s.mlp)) for s in program.sites}
    for call in plan.calls:
        product = design.linears[call.name]
        pack = partial(pack_linear, product=product, axi_words=design.axi_words)
        streams[call.name] = (product.stream_bytes, stream(pack, call))
    for own in () if plan.step is None else plan.step.drafts:
        products = design.drafts[own.name]

        def packed(layer: int = own.layer, products: DraftProducts = products) -> NDArray[np.uint8]:
            return pack_draft(draft_weights(program, layer), products, design.axi_words)

        streams[own.name] = (products.stream_bytes, packed)
    return streams


def draft_weights(program: DecoderProgram, layer: int) -> list[LinearWeights]:
    """Return the quantised linears of a layer's draft, in the order of `pack_draft`."""
    params = {
        name: program.params[f"draft_{name}_{layer}"] for name in PARTS if f"draft_{name}_{layer}" in program.params
    }
    linears = list[LinearWeights]()
    for name, bias in (("gate_proj", "gate_bias"), ("up_proj", "up_bias"), ("inner", ""), ("outer", "")):
        if name in params:
            scales = program.params[f"draft_{name}_scale_{layer}"].numpy()
            linears.append(
                LinearWeights(params[name].numpy(), scales, params[bias].numpy() if bias in params else None)
            )
    return linears


def linear_weights(program: DecoderProgram, names: Sequence[str], biases: Sequence[str | None]) -> list[LinearWeights]:
    """Return quantised linears by the names that their weights had before; int4 packed, as the parameters are."""
    params, linears = program.params, []
    for name, bias in zip(names, biases, strict=True):
        values = params[f"{name}_int4" if f"{name}_int4" in params else f"{name}_int8"]
        scales = params[f"{name}_scale"].numpy()
        linears.append(LinearWeights(values.numpy(), scales, None if bias is None else params[bias].float().numpy()))
    return linears
