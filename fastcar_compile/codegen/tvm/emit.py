"""The host part of an artifact: TVM libraries for instruction sets of choice, and for the board's own CPU."""

from __future__ import annotations

import copy
import platform
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fastcar_compile.artifact.layout import board_library, host_library
from fastcar_compile.artifact.sections import (
    AcceleratorSection,
    BoardPart,
    HostSection,
    ProgramPart,
    ProgramsPart,
    VariantPart,
)
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.base import EmitContext
from fastcar_compile.codegen.tvm.isa import InstructionSet, instruction_sets
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.modules import tensor_attributes
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.targets import Target

if TYPE_CHECKING:
    from fastcar_compile.codegen.tvm.build import LoweredModule


def host_variants(names: Sequence[str]) -> list[InstructionSet]:
    """Return the instruction sets that an artifact is to carry libraries for, the best one of each machine first.

    Raises:
        CompileError: an unknown name, or no linker for one of them; all of these at once.
    """
    variants = instruction_sets(names)
    machine = f"{platform.machine()}-linux-gnu"
    needed = {isa.name: cross_compiler(isa.triple, machine) for isa in variants}
    problems = [
        CompileError(
            f"{compiler} is not on PATH, so no library for {name} can be linked",
            where="host_cpus",
            hint=f"install it, or leave {name} out",
        )
        for name, compiler in needed.items()
        if shutil.which(compiler) is None
    ]
    if problems:
        raise CompileError.collect(problems)
    return variants


class TvmEmitter:
    """Lowers to CPUs: the context's instruction sets, and for an FPGA board also the board's own CPU.

    With an accelerator there is also the decode step that calls it.
    """

    def emit(self, program: DecoderProgram, context: EmitContext) -> HostSection:
        """Write the libraries; see Emitter.emit."""
        context.say("lowering with TVM")
        from fastcar_compile.codegen.tvm.build import lower

        programs = {"decode": (program.graph_module, program.outputs)}
        if program.prefill is not None:
            programs["prefill"] = (program.prefill, program.prefill_outputs)
        if program.context is not None:
            programs["context"] = (program.context, program.context_outputs)
        if context.section(AcceleratorSection) is not None:
            # Graphs are copied, weights are not.
            host = copy.deepcopy(
                program, {id(t): t for g in program.all_graphs() for t in tensor_attributes(g).values()}
            )
            run_pipeline(host, offload_pipeline(context.options.offload))
            programs["offload"] = (host.graph_module, host.outputs)
        first = context.variants[0]
        lowered = {name: lower(graph, outputs, first) for name, (graph, outputs) in programs.items()}
        machine = f"{platform.machine()}-linux-gnu"
        variants = [
            _emit_variant(context.writer, lowered if isa is first else _retargeted(lowered, isa), isa, machine)
            for isa in context.variants
        ]
        target = context.target
        board = emit_board(context.writer, lowered, target, machine) if target.kind == "fpga" else None
        return HostSection(variants=tuple(variants), board=board)


def _retargeted(lowered: Mapping[str, LoweredModule], isa: InstructionSet) -> dict[str, LoweredModule]:
    return {name: module.retarget(isa) for name, module in lowered.items()}


def _emit_variant(
    writer: ArtifactWriter, lowered: Mapping[str, LoweredModule], isa: InstructionSet, machine: str
) -> VariantPart:
    programs: dict[str, ProgramPart] = {}
    compiler = cross_compiler(isa.triple, machine)
    for name, module in lowered.items():
        library = host_library(isa.triple, isa.name, name)
        module.export(writer.file(library), compiler, writer.scratch)
        programs[name] = module.program(library)
    return VariantPart(
        instruction_set=isa.name, triple=isa.triple, flags=tuple(sorted(isa.flags)), programs=ProgramsPart(**programs)
    )


def cross_compiler(triple: str, machine: str) -> str:
    """Return the name of the C++ compiler that links for `triple` on a machine whose own triple is `machine`."""
    return "g++" if triple == machine else f"{triple}-g++"


def emit_board(writer: ArtifactWriter, lowered: Mapping[str, LoweredModule], board: Target, machine: str) -> BoardPart:
    """Write the programs for the board's CPU: libraries, or object files and a warning where the linker is missing.

    Args:
        lowered: by name of the program. machine: triple of the build machine.
    """
    from fastcar_compile.codegen.tvm.target import board_instruction_set

    triple, cpu = board.host_triple, board.host.cpu
    compiler = cross_compiler(triple, machine)
    linked = shutil.which(compiler) is not None
    if not linked:
        text = (
            f"{compiler} is not on PATH: the host programs for {triple} are written as object files (.tar), not as "
            f"libraries. Install it (Debian: g++-{triple}) and compile again"
        )
        warnings.warn(text, UserWarning, stacklevel=2)
    isa = board_instruction_set(cpu, triple)
    programs: dict[str, ProgramPart] = {}
    for name, module in lowered.items():
        file = board_library(triple, cpu if triple == machine else None, name, linked=linked)
        compiled = module.retarget(isa)
        if linked:
            compiled.export(writer.file(file), compiler, writer.scratch)
        else:
            compiled.export_objects(writer.file(file), writer.scratch)
        programs[name] = module.program(file)
    return BoardPart(
        triple=triple,
        cpu=cpu,
        instruction_set=isa.name,
        compiler=compiler,
        linked=linked,
        programs=ProgramsPart(**programs),
    )
