"""The host part of an artifact: TVM libraries for instruction sets of choice, and for the board's own CPU."""

from __future__ import annotations

import copy
import platform
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fastcar_compile.artifact.store import ArtifactWriter
from fastcar_compile.codegen.tvm.isa import InstructionSet, instruction_sets
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.modules import tensor_attributes
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.targets import Target


def host_variants(names: Sequence[str]) -> list[InstructionSet]:
    """The instruction sets that an artifact is to carry libraries for, the best one of each architecture first.

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


def emit_host(
    writer: ArtifactWriter,
    program: DecoderProgram,
    board: Target,
    *,
    variants: Sequence[InstructionSet],
    accelerator: bool,
    offload: str,
) -> dict[str, Any]:
    """Lower to CPUs, `variants` of them, and for an FPGA board also to the board's.

    With an accelerator there is also the host program that calls it for `offload`.

    Returns:
        The manifest's section: `variants`, of each architecture the best one first: instruction set, triple, the flags
        of /proc/cpuinfo that it needs, and per program (`decode`, `prefill`, `offload`) its library and its argument
        names; `board` the programs for the board's CPU, else None.
    """
    from fastcar_compile.codegen.tvm.build import lower

    programs = {"decode": (program.graph_module, program.outputs)}
    if program.prefill is not None:
        programs["prefill"] = (program.prefill, program.prefill_outputs)
    if accelerator:
        # Graphs are copied, weights are not.
        host = copy.deepcopy(program, {id(t): t for g in program.graphs() for t in tensor_attributes(g).values()})
        run_pipeline(host, offload_pipeline(offload))
        programs["offload"] = (host.graph_module, host.outputs)
    first = variants[0]
    lowered = {name: lower(graph, outputs, first) for name, (graph, outputs) in programs.items()}
    machine = f"{platform.machine()}-linux-gnu"
    sections = [
        _emit_variant(writer, lowered if isa is first else _retargeted(lowered, isa), isa, machine) for isa in variants
    ]
    for_board = emit_board(writer, lowered, board, machine) if board.kind == "fpga" else None
    return {"variants": sections, "board": for_board}


def _retargeted(lowered: Mapping[str, Any], isa: InstructionSet) -> dict[str, Any]:
    return {name: module.retarget(isa) for name, module in lowered.items()}


def _emit_variant(
    writer: ArtifactWriter, lowered: Mapping[str, Any], isa: InstructionSet, machine: str
) -> dict[str, Any]:
    programs: dict[str, Any] = {}
    compiler = cross_compiler(isa.triple, machine)
    for name, module in lowered.items():
        library = f"host/{isa.triple}/{isa.name}/{name}.so"
        module.export(writer.file(library), compiler)
        programs[name] = {"library": library, **module.arguments()}
    return {"instruction_set": isa.name, "triple": isa.triple, "flags": sorted(isa.flags), "programs": programs}


def cross_compiler(triple: str, machine: str) -> str:
    """Name of the C++ compiler that links for `triple` on a machine whose own triple is `machine`."""
    return "g++" if triple == machine else f"{triple}-g++"


def emit_board(writer: ArtifactWriter, lowered: Mapping[str, Any], board: Target, machine: str) -> dict[str, Any]:
    """The programs for the board's CPU: shared libraries, or object files and a warning where the linker is missing.

    Args:
        lowered: program name -> LoweredModule. machine: triple of the build machine.

    Returns:
        The manifest's `host.board`: triple, cpu, instruction set, compiler, linked, and per program its library and
        argument names.
    """
    from fastcar_compile.codegen.tvm.target import board_instruction_set

    triple, cpu = board.host_triple, board.host.cpu
    compiler = cross_compiler(triple, machine)
    linked = shutil.which(compiler) is not None
    if not linked:
        text = (
            f"{compiler} is not on PATH: the host programs for {triple} are written as object files (.tar), not as "
            f"libraries. Install it (Debian: g++-{triple}) and compile again, or link them on "
            "the board, docs/tutorial/board.md"
        )
        warnings.warn(text, UserWarning, stacklevel=2)
    folder = f"host/{triple}" if triple != machine else f"host/{triple}-{cpu}"
    isa = board_instruction_set(cpu, triple)
    programs = {}
    for name, module in lowered.items():
        file = f"{folder}/{name}.{'so' if linked else 'tar'}"
        compiled = module.retarget(isa)
        if linked:
            compiled.export(writer.file(file), compiler)
        else:
            compiled.export_objects(writer.file(file))
        programs[name] = {"library": file, **module.arguments()}
    return {
        "triple": triple,
        "cpu": cpu,
        "instruction_set": isa.name,
        "compiler": compiler,
        "linked": linked,
        "programs": programs,
    }
