"""Write an artifact: graphs, weights, host libraries, ONNX, HLS project, DRS table and report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from fastcar_compile.artifact.report import write_report
from fastcar_compile.artifact.store import ArtifactWriter
from fastcar_compile.artifact.tensor_files import Placement, WrittenTensors, plan_shards
from fastcar_compile.codegen.hls.board.host_program import SOURCES, host_sources
from fastcar_compile.codegen.hls.emit_accelerator import emit_accelerator
from fastcar_compile.codegen.onnx.export import EXTERNAL_DATA_FROM, ONNX_EXTERNAL, ONNX_INLINE, export_onnx
from fastcar_compile.codegen.tvm.emit import emit_host
from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.config import CompileConfig
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.program_json import graph_file_text, program_sections
from fastcar_compile.ir.text import graph_to_text
from fastcar_compile.ir.weights import LazyWeights
from fastcar_compile.targets import Target

Progress = Callable[[str], None]
WEIGHTS = "weights/model"
"""Stem of the weight files."""


def emit_artifact(
    program: DecoderProgram,
    original: DecoderProgram,
    config: CompileConfig,
    board: Target,
    pipeline: str,
    output: Path,
    say: Progress,
    variants: Sequence[InstructionSet],
) -> Path:
    """Write everything below `output`, atomically; returns its path."""
    with ArtifactWriter(output) as writer:
        _emit_graphs(writer, program, original)
        say("writing the weights")
        places = _emit_weights(writer, program, one_file=board.kind == "fpga")
        if program.lazy is not None:
            # Whoever reads weights from here on takes them from the files: they are quantised once.
            written = WrittenTensors(writer.root, places, program.params)
            program = dataclasses.replace(program, lazy=LazyWeights(written))
        say("exporting to ONNX")
        external = program.params.nbytes() >= EXTERNAL_DATA_FROM
        model = ONNX_EXTERNAL if external else ONNX_INLINE
        export_onnx(program, writer.file(model), places if external else None)
        accelerator = None
        if board.kind == "fpga":
            say("writing the HLS project and the DRS table")
            accelerator = emit_accelerator(writer, program, config, board)
        say("lowering with TVM")
        host = emit_host(
            writer, program, board, variants=variants, accelerator=accelerator is not None, offload=config.offload
        )
        if host["board"] is not None:
            for name, text in host_sources(program, host["board"], accelerator).items():
                writer.write_text(f"{SOURCES}/{name}", text)
        sections = program_sections(program) | {
            "config": config.to_json(),
            "target": board.model_dump(mode="json"),
            "pipeline": pipeline,
            "log": program.log,
            "host": host,
            "accelerator": accelerator,
        }
        for name, value in sections.items():
            writer.section(name, value)
        write_report(writer, program, sections)
        say("checking and placing the files")
    return writer.path


def _emit_weights(writer: ArtifactWriter, program: DecoderProgram, *, one_file: bool) -> dict[str, Placement]:
    """The weight files, or one file, as the host program of a board reads it; returns where each parameter is."""
    places: dict[str, Placement] = {}
    params = program.params
    for file, names in plan_shards(params, WEIGHTS, one_file=one_file).items():
        places |= writer.write_streamed(file, names, params)
    return places


def _emit_graphs(writer: ArtifactWriter, program: DecoderProgram, original: DecoderProgram) -> None:
    writer.write_text("graph/before.txt", graph_to_text(original.graph_module))
    writer.write_text("graph/after.txt", graph_to_text(program.graph_module))
    writer.write_text("graph/before.json", graph_file_text(original))
    writer.write_text("graph/after.json", graph_file_text(program))
