"""The accelerator parts of an artifact: HLS project, packed weights and the DRS control table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.layout import ACCELERATOR_WEIGHTS, DRS_TABLE, DRS_TABLE_JSON, HLS
from fastcar_compile.artifact.offload import NETWORK
from fastcar_compile.artifact.sections.accelerator import AcceleratorSection, HostLinearPart, LinearCallPart
from fastcar_compile.artifact.tensor_files import LazyStreams
from fastcar_compile.codegen.base import EmitContext
from fastcar_compile.codegen.hls.control import control_table, controller_part, network_stream, networks_of, operands_of
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import explore
from fastcar_compile.codegen.hls.design.footprint import Footprint, require_banks, require_fit, shares_memory
from fastcar_compile.codegen.hls.design.product import WORD_BYTES
from fastcar_compile.codegen.hls.design.spec import LinearSpec, MlpSpec
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_linear, pack_mlp
from fastcar_compile.codegen.hls.project import emit_hls, kernel_interfaces
from fastcar_compile.codegen.hls.vitis import weight_ports
from fastcar_compile.config import CompileConfig
from fastcar_compile.drs.scores import network_words
from fastcar_compile.errors import CompileError
from fastcar_compile.formats import quant_format
from fastcar_compile.ir.program import DecoderProgram, StateRole
from fastcar_compile.ir.sites import LayerSite
from fastcar_compile.ops.quant import unpack_int4
from fastcar_compile.passes.patterns.linear_calls import HostLinear, LinearCall, linear_calls
from fastcar_compile.targets import Target

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
    """Write hls/, drs/ and weights/accelerator.safetensors; return the manifest's section.

    Raises:
        CompileError: kernel or decoder does not fit the board, or there is no kernel for a shape.
    """
    writer, config, board = context.writer, context.options, context.target
    if not quant_format(config.quant).accelerated:
        text = f"target {board.name} gets no accelerator kernels: they are int8, and quant is {config.quant!r}"
        warnings.warn(text, UserWarning, stacklevel=2)
        return None
    _check_equal(program.sites)
    ring = program.config.ring
    positions = config.max_seq_len if ring is None else ring.capacity
    require_fit(_footprint(program, board), board, quant=config.quant, positions=positions)
    calls, kept = _linears(program) if config.offload == "linears" else ([], [])
    linears = [LinearSpec(c.name, c.inputs, sum(c.channels), c.biased) for c in calls]
    found = explore(_mlp_spec(program, config), board, operands_of(program), linears)
    design = found.design
    table = control_table(program, config, design.mlp.cores, design.prefetch_bytes)
    streams: dict[str, tuple[int, Stream]] = {
        f"layer_{s.layer}": (design.stream_bytes, partial(_mlp_stream, program, s, design)) for s in program.sites
    }
    for call in calls:
        product = design.linears[call.name]
        streams[call.name] = (product.stream_bytes, partial(_linear_stream, program, call, design))
    for layer, weights in networks_of(program).items():
        words = network_words(weights.units, design.mlp.hidden)
        streams[f"{NETWORK}{layer}"] = (words * WORD_BYTES, partial(network_stream, weights))
    kernels = kernel_interfaces(design, table)
    require_banks(board, ports=weight_ports(kernels), stream_bytes=design.weight_bytes)
    emit_hls(design, writer.root / HLS, table, board=board)
    writer.write_streamed(ACCELERATOR_WEIGHTS, streams, LazyStreams(streams))
    writer.write_bytes(DRS_TABLE, table.to_bytes())
    writer.write_text(DRS_TABLE_JSON, json.dumps(table.to_json(), sort_keys=True, indent=1) + "\n")
    return AcceleratorSection(
        offload=config.offload,
        weights=ACCELERATOR_WEIGHTS,
        table=DRS_TABLE,
        controller=controller_part(table),
        design=design.part,
        exploration=found.part,
        kernels=tuple(interface.part for interface in kernels),
        linears=tuple(LinearCallPart(**call.to_json()) for call in calls),
        on_host=tuple(HostLinearPart(**asdict(linear)) for linear in kept),
    )


def _mlp_spec(program: DecoderProgram, config: CompileConfig) -> MlpSpec:
    """Return the MLP that all layers share; the exploration chooses the cores."""
    mlps = [site.mlp for site in program.sites]
    mlp = mlps[0]
    return MlpSpec(
        hidden=mlp.hidden,
        intermediate=mlp.intermediate,
        batch=config.batch_size,
        layers=len(mlps),
        cores=1,
        activation=mlp.activation,
        gated=mlp.gated,
        quant=config.quant,
        up_bias=any(bias is not None for m in mlps for bias in m.biases[:-1]),
        down_bias=any(m.biases[-1] is not None for m in mlps),
    )


def _footprint(program: DecoderProgram, board: Target) -> Footprint:
    """Return what the weight memories hold: everything on a board whose memory is the host's too, else the weights."""
    weights = program.params.nbytes()
    if not shares_memory(board):
        return Footprint(weights, 0, 0)
    attention = (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)
    cache = sum(s.nbytes for s in program.state if s.role in attention)
    gate = sum(s.nbytes for s in program.state if s.role is StateRole.GATE_CACHE)
    return Footprint(weights, cache, sum(s.nbytes for s in program.state) - cache - gate, gate)


def _linears(program: DecoderProgram) -> tuple[list[LinearCall], list[HostLinear]]:
    """Return the linear calls of a forward, and the linears that stay on the host.

    Raises:
        CompileError: there is none to offload.
    """
    calls, kept = linear_calls(program)
    if not calls:
        reasons = "; ".join(f"{k.path}: {k.reason}" for k in kept) or "the decode step has none outside of the MLPs"
        raise CompileError(f"offload='linears' finds no linear to offload ({reasons})", hint="use offload='mlp'")
    return calls, kept


def _check_equal(sites: Sequence[LayerSite]) -> None:
    """Raise CompileError when layers differ: they share one kernel."""

    def shape(site: LayerSite) -> str:
        kind = f"{'gated' if site.mlp.gated else 'plain'} {site.mlp.activation}"
        return f"layer {site.layer}: {kind}, {site.mlp.hidden} / {site.mlp.intermediate}"

    different = [s for s in sites if shape(s).partition(":")[2] != shape(sites[0]).partition(":")[2]]
    if different:
        raise CompileError(
            f"the accelerator has one MLP kernel, but the layers differ: {shape(sites[0])}; {shape(different[0])}",
            where=different[0].source,
            hint="compile for a CPU target",
        )


def _mlp_stream(program: DecoderProgram, site: LayerSite, design: Design) -> NDArray[np.uint8]:
    """Return the kernel's weight stream of one layer, uint8."""
    return pack_mlp(_weights(program, site.mlp.weights, site.mlp.biases), design)


def _linear_stream(program: DecoderProgram, call: LinearCall, design: Design) -> NDArray[np.uint8]:
    """Return the kernel's weight stream of one linear call, uint8."""
    return pack_linear(_weights(program, call.weights, call.biases), design.linears[call.name], design.axi_words)


def _weights(program: DecoderProgram, names: Sequence[str], biases: Sequence[str | None]) -> list[LinearWeights]:
    """Return quantised linears by the names that their weights had before."""
    params, linears = program.params, []
    for name, bias in zip(names, biases, strict=True):
        int4 = f"{name}_int4" in params
        values = unpack_int4(params[f"{name}_int4"]) if int4 else params[f"{name}_int8"]
        scales = params[f"{name}_scale"].numpy()
        linears.append(LinearWeights(values.numpy(), scales, None if bias is None else params[bias].float().numpy()))
    return linears
