"""The accelerator parts of an artifact: HLS project, packed MLP weights and the DRS control table."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from fastcar_compile.codegen.board.kernels import Kernel
from fastcar_compile.codegen.drs.table import AttentionShape, DrsTable, build_table
from fastcar_compile.codegen.hls.design import MlpDesign, choose_design
from fastcar_compile.codegen.hls.emit import emit_hls, kernel_interfaces
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec
from fastcar_compile.codegen.hls.weights import pack_mlp
from fastcar_compile.config import CompileConfig
from fastcar_compile.errors import CompileError
from fastcar_compile.ir import DecoderProgram, LayerSite
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
        CompileError: the MLP does not fit the board, or its shape has no kernel.
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
    design = choose_design(spec, _budget(board))
    table = control_table(program, config, spec.cores)
    emit_hls(design, writer.root / "hls", table)
    streams = {f"layer_{s.layer}": _stream(program, s, design) for s in program.sites}
    writer.write_tensors(WEIGHTS, streams)
    writer.write_bytes(TABLE, table.to_bytes())
    writer.write_text("drs/table.json", json.dumps(table.to_json(), sort_keys=True, indent=1) + "\n")
    kernels = [Kernel.of(interface).to_json() for interface in kernel_interfaces(design, table)]
    return {"design": design.to_json(), "weights": WEIGHTS, "table": TABLE, "kernels": kernels}


def control_table(program: DecoderProgram, config: CompileConfig, cores: int) -> DrsTable:
    """The DRS control table of a program. The MLP kernel has no prefetch buffer yet, so nothing is ever prefetched.

    Raises:
        CompileError: the layers have different attention shapes.
        UserError: a size is out of the table's range.
    """
    sites, replay = program.sites, config.replay
    shapes: dict[AttentionShape, int] = {}
    for site in sites:
        shapes.setdefault(AttentionShape(site.num_heads, site.num_kv_heads, site.head_dim), site.layer)
    if len(shapes) > 1:
        raise CompileError(
            f"the layers have different attention shapes: {'; '.join(f'layer {n}: {s}' for s, n in shapes.items())}",
            mend="compile for a CPU target; the TAS unit has one shape for all layers",
        )
    return build_table(
        *(len(sites), config.batch_size, cores, config.tokens_per_frame),
        [float("inf") if s.threshold is None else s.threshold for s in sites],
        attention=next(iter(shapes)),
        scales=[s.scale if s.replay else None for s in sites],
        max_chain=replay.max_chain if replay else None,
        couple_cfg=replay.couple_cfg if replay else False,
    )


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
