"""The question that an artifact's manifest asks."""

from __future__ import annotations

from collections.abc import Sequence

from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection, LayerPart
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.footprint import Footprint
from fastcar_compile.config import CompileConfig
from fastcar_compile.estimate.gate import GateModel
from fastcar_compile.estimate.shapes import shape_of_sections
from fastcar_compile.estimate.workload import Workload
from fastcar_compile.formats import kv_type
from fastcar_compile.formats.quant import ACCELERATED
from fastcar_compile.step.program import StepProgram, read_program
from fastcar_compile.targets import Target

DEFAULT_QUANT = "w8a8"
"""Of an artifact without an engine, which a board is asked about all the same."""


def workload_of(manifest: Manifest) -> Workload:
    """Return what an artifact decodes; attention reads half of the cache, the mean of a video."""
    return workload_of_sections(manifest.options, manifest.decoder, manifest.layers.layers)


def workload_of_sections(options: CompileConfig, decoder: DecoderSection, layers: Sequence[LayerPart]) -> Workload:
    """Return the same of a decoder that may not have been written.

    Raises:
        UserError: the layers differ in size; the model has one size for all.
    """
    accelerated = options.quant in ACCELERATED
    rows = round(sum(s.attention.cache_rows for s in layers) / len(layers))
    return Workload(
        shape_of_sections(decoder.config, layers),
        options.quant if accelerated else DEFAULT_QUANT,
        max(1, options.max_seq_len // 2),
        batch=options.batch_size,
        offload=options.offload,
        kv=kv_type(options.kv).dtype,
        sink_window=_sink_window(layers, max(1, options.max_seq_len // 2)),
        kv_rows=None if rows == options.max_seq_len and options.offload != "all" else rows,
        gate=GateModel.of_sections(options.replay, layers),
        couple_cfg=options.replay is not None and options.replay.couple_cfg,
        memory=Footprint.of(decoder.weight_bytes, decoder.state) if accelerated else None,
    )


def _sink_window(layers: Sequence[LayerPart], context: int) -> tuple[int, int] | None:
    """Return sinks and window of the layers; where they differ, one window of their mean. None: no layer has one."""
    own = [(a.sinks, a.window) for a in (s.attention for s in layers) if a.window is not None]
    if not own:
        return None
    if len(set(own)) == 1 and len(own) == len(layers):
        return own[0]
    seen = sum(min(context, sinks + window) for sinks, window in own) + (len(layers) - len(own)) * context
    return 0, round(seen / len(layers))


def program_of(artifact: StoredArtifact) -> StepProgram | None:
    """Return the step program that was emitted; None: there is none."""
    accelerator = artifact.manifest.accelerator
    step = None if accelerator is None else accelerator.step
    return None if step is None else read_program(artifact.files.data(step.program))


def design_of(manifest: Manifest, board: Target) -> Design | None:
    """Return the design that was emitted for this board; None: there is none."""
    if manifest.accelerator is None or board != manifest.target:
        return None
    return Design.of(manifest.accelerator.design)
