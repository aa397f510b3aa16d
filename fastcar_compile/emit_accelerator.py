"""The accelerator parts of an artifact: HLS project, packed MLP weights and the DRS control table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcar_compile.codegen.drs.table import build_table
from fastcar_compile.codegen.hls.design import MlpDesign, choose_design
from fastcar_compile.codegen.hls.emit import emit_hls
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec
from fastcar_compile.codegen.hls.weights import LinearWeights, pack_mlp
from fastcar_compile.config import CompileConfig
from fastcar_compile.errors import CompileError
from fastcar_compile.ir import DecoderProgram, LayerSite
from fastcar_compile.ops.quant import unpack_int4
from fastcar_compile.runtime.store import ArtifactWriter
from fastcar_compile.runtime.tensor_files import LazyTensors
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
    if config.quant == "none":
        text = f"target {board.name} gets no accelerator kernels: they are int8, and quant is {config.quant!r}"
        warnings.warn(text, UserWarning, stacklevel=2)
        return None
    _check_equal(program.sites)
    site = program.sites[0]
    spec = MlpSpec(
        hidden=site.hidden,
        intermediate=site.intermediate,
        batch=config.batch_size,
        layers=len(program.sites),
        cores=min(config.batch_size, MAX_CORES),
        activation=site.activation,
        gated=site.gated,
        quant=config.quant,
        up_bias=any(bias is not None for s in program.sites for bias in s.biases[:-1]),
        down_bias=any(s.biases[-1] is not None for s in program.sites),
    )
    design = choose_design(spec, _budget(board))
    emit_hls(design, writer.root / "hls")
    by_name = {f"layer_{s.layer}": s for s in program.sites}
    size, params = (design.stream_bytes,), program.params
    streams = LazyTensors(by_name, size, torch.uint8, lambda name: _stream(params, by_name[name], design))
    writer.write_streamed(WEIGHTS, by_name, streams)
    thresholds = [float("inf") if s.threshold is None else s.threshold for s in program.sites]
    table = build_table(len(program.sites), config.batch_size, spec.cores, config.tokens_per_frame, thresholds)
    writer.write_bytes(TABLE, table.to_bytes())
    writer.write_text("drs/table.json", json.dumps(table.to_json(), sort_keys=True, indent=1) + "\n")
    return {"design": design.to_json(), "weights": WEIGHTS, "table": TABLE}


def _check_equal(sites: Sequence[LayerSite]) -> None:
    """Raises CompileError when layers differ: they share one kernel."""

    def shape(site: LayerSite) -> str:
        kind = f"{'gated' if site.gated else 'plain'} {site.activation}"
        return f"layer {site.layer}: {kind}, {site.hidden} / {site.intermediate}"

    different = [s for s in sites if shape(s).partition(":")[2] != shape(sites[0]).partition(":")[2]]
    if different:
        raise CompileError(
            f"the accelerator has one MLP kernel, but the layers differ: {shape(sites[0])}; {shape(different[0])}",
            where=different[0].source,
            mend="compile for a CPU target",
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


def _stream(params: Mapping[str, Tensor], site: LayerSite, design: MlpDesign) -> Tensor:
    """The kernel's weight stream of one layer, uint8."""
    linears = []
    for name, bias in zip(site.weights, site.biases, strict=True):
        int4 = design.spec.weight_bits == 4
        values = unpack_int4(params[f"{name}_int4"]) if int4 else params[f"{name}_int8"]
        scales = params[f"{name}_scale"].numpy()
        linears.append(LinearWeights(values.numpy(), scales, None if bias is None else params[bias].float().numpy()))
    return torch.from_numpy(pack_mlp(linears, design))
