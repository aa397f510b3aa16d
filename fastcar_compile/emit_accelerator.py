"""The accelerator parts of an artifact: HLS project, packed weights and the DRS control table."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from typing import Any

import torch

from fastcar_compile.codegen.board.kernels import Kernel
from fastcar_compile.codegen.drs.table import DrsTable
from fastcar_compile.codegen.hls.design import MlpDesign, choose_design
from fastcar_compile.codegen.hls.emit import emit_hls, kernel_interfaces
from fastcar_compile.codegen.hls.engine_design import EngineDesign, choose_engine
from fastcar_compile.codegen.hls.linear_spec import EngineSpec, LinearSpec
from fastcar_compile.codegen.hls.linear_weights import pack_linear
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec
from fastcar_compile.codegen.hls.weights import pack_mlp
from fastcar_compile.config import CompileConfig
from fastcar_compile.emit_control import control_table, controller_json
from fastcar_compile.errors import CompileError
from fastcar_compile.ir import DecoderProgram, LayerSite
from fastcar_compile.passes.linear_calls import LinearCall, linear_calls
from fastcar_compile.runtime.store import ArtifactWriter
from fastcar_compile.targets import Target

WEIGHTS, TABLE = "weights/accelerator.safetensors", "drs/table.bin"

MAX_CORES = 4
"""More cores than batch rows would idle; four share one weight stream without more ports."""


def emit_accelerator(
    writer: ArtifactWriter, program: DecoderProgram, config: CompileConfig, board: Target
) -> dict[str, Any] | None:
    """Write hls/, drs/ and weights/accelerator.safetensors; returns the manifest's section.

    Raises:
        CompileError: the kernel does not fit the board, or there is none for a shape.
    """
    if config.quant != "w8a8":
        text = f"target {board.name} gets no accelerator kernels: they are int8, and quant is {config.quant!r}"
        warnings.warn(text, UserWarning, stacklevel=2)
        return None
    site = program.sites[0]
    spec = MlpSpec(
        hidden=site.hidden,
        intermediate=site.intermediate,
        batch=config.batch_size,
        layers=len(program.sites),
        cores=min(config.batch_size, MAX_CORES),
        activation=site.activation,
        gated=site.gated,
    )
    table = control_table(program, config, spec.cores)
    section: dict[str, Any] = {
        "offload": config.offload,
        "weights": WEIGHTS,
        "table": TABLE,
        "controller": controller_json(table),
    }
    if config.offload == "linears":
        engine, streams, offloaded = _engine(program, spec, _budget(board))
        emit_hls(engine, writer.root / "hls", table)
        section |= offloaded | {"design": engine.to_json(), "kernels": _kernels(engine, table)}
        design = engine.mlp
    else:
        design, streams = choose_design(spec, _budget(board)), {}
        emit_hls(design, writer.root / "hls", table)
        section |= {"design": design.to_json(), "kernels": _kernels(design, table)}
    streams |= {f"layer_{s.layer}": _stream(program, s, design) for s in program.sites}
    writer.write_tensors(WEIGHTS, streams)
    writer.write_bytes(TABLE, table.to_bytes())
    writer.write_text("drs/table.json", json.dumps(table.to_json(), sort_keys=True, indent=1) + "\n")
    return section


def _kernels(design: MlpDesign | EngineDesign, table: DrsTable) -> list[dict[str, Any]]:
    return [Kernel.of(interface).to_json() for interface in kernel_interfaces(design, table)]


def _engine(
    program: DecoderProgram, spec: MlpSpec, budget: BoardBudget
) -> tuple[EngineDesign, dict[str, Any], dict[str, Any]]:
    """The engine, the weight streams of its linears, and what the manifest says about them."""
    calls, kept = linear_calls(program)
    if not calls:
        reasons = "; ".join(f"{k.path}: {k.reason}" for k in kept) or "the decode step has none outside of the MLPs"
        raise CompileError(f"offload='linears' finds no linear to offload ({reasons})", mend="use offload='mlp'")
    linears = tuple(LinearSpec(c.name, c.inputs, sum(c.channels), c.biased) for c in calls)
    design = choose_engine(EngineSpec(spec, linears), budget)
    streams = {c.name: _linear_stream(program, c, design) for c in calls}
    return design, streams, {"linears": [c.to_json() for c in calls], "on_host": [asdict(k) for k in kept]}


def _linear_stream(program: DecoderProgram, call: LinearCall, design: EngineDesign) -> Any:
    params = program.params
    parts = []
    for weight, scale, bias in zip(call.weights, call.scales, call.biases, strict=True):
        floats = [None if name is None else params[name].to(torch.float32).numpy() for name in (scale, bias)]
        parts.append((params[weight].to(torch.int8).numpy(), *floats))
    return pack_linear(parts, design.linears[call.name])


def _budget(board: Target) -> BoardBudget:
    assert board.fabric is not None
    memory = board.memories[0]
    return BoardBudget(
        part=board.part or "",
        clock_mhz=board.fabric.clock_mhz,
        axi_ports=memory.ports,
        axi_bits=memory.width_bits,
        **board.budget(),
    )


def _stream(program: DecoderProgram, site: LayerSite, design: MlpDesign) -> Any:
    """The kernel's weight stream of one layer, uint8, from gate, up and down in this order."""
    params, arrays = program.params, []
    for name in site.weights:
        weight, scale = params[f"{name}_int8"], params[f"{name}_scale"]
        arrays.append((weight.to(torch.int8).numpy(), scale.to(torch.float32).numpy()))
    (gate, gate_scale), (up, up_scale), (down, down_scale) = arrays
    return pack_mlp(gate, gate_scale, up, up_scale, down, down_scale, design)
