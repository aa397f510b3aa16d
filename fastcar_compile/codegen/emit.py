"""Write an artifact: graphs, weights, then what every emitter (a backend's compile side) adds, then the report."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar

from fastcar_compile.artifact import layout
from fastcar_compile.artifact.accelerator_section import AcceleratorSection
from fastcar_compile.artifact.explain import write_report
from fastcar_compile.artifact.layout import weight_file
from fastcar_compile.artifact.manifest import Sections
from fastcar_compile.artifact.programs import decoder_section, graph_file_text, layers_section
from fastcar_compile.artifact.sections import HostSection, OnnxSection, PipelineSection, Section
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.plan import BuildPlan
from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.errors import CompileError, InternalError
from fastcar_compile.ir.ops.operator import operator_reasons
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import with_branches
from fastcar_compile.ir.tensor_files import TensorPlacement, TensorSpec
from fastcar_compile.ir.text import graph_to_text
from fastcar_compile.ir.weight_checks import warn_of_losses
from fastcar_compile.ir.weights import LazyWeights, WrittenTensors
from fastcar_compile.support.machine import require_memory
from fastcar_compile.support.packages import Registry

Progress = Callable[[str], None]
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class EmitContext:
    """What an emitter is given besides the program.

    Args:
        writer: takes files.
        plan: everything that was decided of the build. variants: instruction sets for this CPU's libraries.
        places: where each parameter's bytes are in the weight files.
        say: reports a stage.
        sections: what the emitters before this one returned, by name.
    """

    writer: ArtifactWriter
    plan: BuildPlan
    variants: Sequence[InstructionSet]
    places: Mapping[str, TensorPlacement]
    say: Progress
    sections: Mapping[str, Section]

    def section(self, kind: type[S]) -> S | None:
        """Return the section of this type that an earlier emitter returned; None: there is none."""
        return next((s for s in self.sections.values() if isinstance(s, kind)), None)


class Emitter(Protocol):
    """Writes one backend's files. A program is not changed."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> Section | None:
        """Write the files; return what the manifest says of them, or None where the backend has nothing to add.

        Raises:
            CompileError: the backend cannot run this program.
        """
        ...


EMITTERS = Registry(
    "emitter",
    "fastcar_compile.emitters",
    {
        "onnx": "fastcar_compile.codegen.onnx.export:OnnxEmitter",
        "hls": "fastcar_compile.codegen.hls.emit:HlsEmitter",
        "tvm": "fastcar_compile.codegen.tvm.emit:TvmEmitter",
        "webgpu": "fastcar_compile.codegen.tvm.emit:GpuEmitter",
        "host-program": "fastcar_compile.codegen.hls.host_program:HostProgramEmitter",
    },
    CompileError,
)
"""In the order in which they run; those of other packages run last, by name."""


# Write an artifact.


def emit_artifact(
    writer: ArtifactWriter, plan: BuildPlan, original: DecoderProgram, variants: Sequence[InstructionSet], say: Progress
) -> None:
    """Write everything below the root of an open writer.

    Args:
        original: the program before it was rewritten. variants: instruction sets for this CPU's libraries.
        say: reports a stage.
    """
    program = plan.program
    writer.links = plan.config.numerics == "exact"  # else onnx reads the weights, and refuses files with several names
    writer.require_room(program.params.nbytes())
    writer.write_text(layout.TEXT_BEFORE, graph_to_text(original.graph_module))
    writer.write_text(layout.TEXT_AFTER, graph_to_text(program.graph_module))
    writer.write_text(layout.GRAPH_BEFORE, graph_file_text(original))
    writer.write_text(layout.GRAPH_AFTER, graph_file_text(program))
    say("writing the weights")
    places, losses = _emit_weights(writer, program, one_file=plan.board.kind == "fpga")
    warn_of_losses(plan.config.quant, losses)
    if program.lazy is not None:
        # Later readers of weights take them from the files: they are quantised once.
        written = WrittenTensors(writer.root, places, program.params.specs())
        program = dataclasses.replace(program, lazy=LazyWeights(written))
    context = EmitContext(writer, plan, variants, places, say, sections={})
    modules = (m for p in (program, original) for step in p.graphs() for m in with_branches(step))
    reasons = dict(sorted({**program.reasons, **operator_reasons(modules)}.items()))
    pipeline = PipelineSection(passes=plan.pipeline, log=tuple(program.log), reasons=reasons)
    sections = _sections(program, plan, pipeline, _run_emitters(program, context))
    write_report(writer, sections)
    writer.finish(sections)
    say("checking and placing the files")


def _run_emitters(program: DecoderProgram, context: EmitContext) -> dict[str, Section]:
    """Run every emitter in the registry's order; return their sections by the emitter's name."""
    found: dict[str, Section] = {}
    for name in EMITTERS.names():
        emitter: Emitter = EMITTERS.load(name)()
        section = emitter.emit(program, dataclasses.replace(context, sections=found))
        if section is not None:
            found = {**found, name: section}
    return found


def _sections(
    program: DecoderProgram, plan: BuildPlan, pipeline: PipelineSection, emitted: Mapping[str, Section]
) -> Sections:
    host, accelerator, onnx = emitted.get("tvm"), emitted.get("hls"), emitted.get("onnx")
    if not isinstance(host, HostSection) or not isinstance(accelerator, AcceleratorSection | None):
        raise InternalError("an emitter returned a section of another type")
    return Sections(
        options=plan.config,
        target=plan.board,
        decoder=decoder_section(program),
        layers=layers_section(program),
        pipeline=pipeline,
        host=host,
        accelerator=accelerator,
        onnx=onnx if isinstance(onnx, OnnxSection) else None,
        extensions={n: s.model_dump(mode="json") for n, s in emitted.items() if n not in EMITTERS.built_in},
    )


def _emit_weights(
    writer: ArtifactWriter, program: DecoderProgram, *, one_file: bool
) -> tuple[dict[str, TensorPlacement], dict[str, float]]:
    """Write the weight files, or one file, as the host program of a board reads it.

    Returns:
        Where each parameter is, and the share of its values that each weight of a checkpoint loses.
    """
    places, losses = dict[str, TensorPlacement](), dict[str, float]()
    params = program.params
    specs = params.specs()
    if program.lazy is not None:
        require_memory(max(spec.nbytes for spec in specs.values()), "the largest weight")
    about = dict if program.lazy is None else program.lazy.losses
    digest = None if writer.cache is None else cache(writer.cache.digests.of_path)  # of the checkpoint's shards
    for file, names in plan_shards(specs, one_file=one_file).items():
        inputs = None if digest is None else params.origins(names, digest)
        own = {name: specs[name] for name in names}
        found, lost = writer.write_pieces(file, own, params.pieces(names), inputs, about)
        places, losses = places | found, losses | lost
    return places, losses


SHARD_BYTES = 1 << 30
"""Weights above this go to several files of about this size."""


def plan_shards(specs: Mapping[str, TensorSpec], *, one_file: bool = False) -> dict[str, list[str]]:
    """Return weight file -> tensor names, in the order of `specs`; several files from `SHARD_BYTES` on."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        size = spec.nbytes
        if shards[-1] and filled + size > SHARD_BYTES and not one_file:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {weight_file(): shards[0]}
    return {weight_file(i): names for i, names in enumerate(shards, 1)}
