"""The host part of an artifact: TVM libraries for the build machine, and for the board's own CPU."""

from __future__ import annotations

import copy
import platform
import shutil
import warnings
from collections.abc import Mapping
from typing import Any

from fastcar_compile.ir import DecoderProgram, tensor_attributes
from fastcar_compile.passes.base import run_pipeline
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.runtime.store import ArtifactWriter
from fastcar_compile.targets import Target


def emit_host(
    writer: ArtifactWriter, program: DecoderProgram, board: Target, *, accelerator: bool, offload: str
) -> dict[str, Any]:
    """Lower to the build machine's CPU, and for an FPGA board also to the board's.

    With an accelerator there is also the host program that calls it for `offload`.

    Returns:
        The manifest's section: `triple` and `programs` of the build machine, per program (`decode`, `prefill`,
        `offload`) its library and its argument names; `board` the same for the board's CPU, else None.
    """
    from fastcar_compile.lowering.build import lower

    triple = f"{platform.machine()}-linux-gnu"
    programs = {"decode": (program.graph_module, program.outputs)}
    if program.prefill is not None:
        programs["prefill"] = (program.prefill, program.prefill_outputs)
    if accelerator:
        # Graphs are copied, weights are not.
        host = copy.deepcopy(program, {id(t): t for g in program.graphs() for t in tensor_attributes(g).values()})
        run_pipeline(host, offload_pipeline(offload))
        programs["offload"] = (host.graph_module, host.outputs)
    lowered = {
        name: lower(graph, outputs, program.sites, program.state_names()) for name, (graph, outputs) in programs.items()
    }
    section: dict[str, Any] = {}
    for name, module in lowered.items():
        library = f"host/{triple}/{name}.so"
        module.export(writer.file(library))
        section[name] = {"library": library, **module.arguments()}
    for_board = emit_board(writer, lowered, board, triple) if board.kind == "fpga" else None
    return {"triple": triple, "programs": section, "board": for_board}


def cross_compiler(triple: str, machine: str) -> str:
    """Name of the C++ compiler that links for `triple` on a machine whose own triple is `machine`."""
    return "g++" if triple == machine else f"{triple}-g++"


def emit_board(writer: ArtifactWriter, lowered: Mapping[str, Any], board: Target, machine: str) -> dict[str, Any]:
    """The programs for the board's CPU: shared libraries, or object files and a warning where the linker is missing.

    Args:
        lowered: program name -> LoweredModule. machine: triple of the build machine.

    Returns:
        The manifest's `host.board`: triple, cpu, compiler, linked, and per program its library and argument names.
    """
    from fastcar_compile.lowering.target import board_instruction_set

    triple, cpu = board.host_triple, board.host.cpu
    compiler = cross_compiler(triple, machine)
    linked = shutil.which(compiler) is not None
    if not linked:
        text = (
            f"{compiler} is not on PATH: the host programs for {triple} are written as object files (.tar), not as "
            f"libraries. Install it (Debian: g++-{triple}) and compile again, or link them on the board, docs/board.md"
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
    return {"triple": triple, "cpu": cpu, "compiler": compiler, "linked": linked, "programs": programs}
