"""The host part of an artifact: a TVM library for each instruction set and for the board's CPU; WGSL for webgpu."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from torch import fx

from fastcar_compile.artifact.cache import Kind
from fastcar_compile.artifact.layout import EMBEDDED, WEB_MODULES, board_library, host_library
from fastcar_compile.artifact.sections import BoardPart, HostSection, VariantPart
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.emit import EmitContext
from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.codegen.tvm.isa import (
    InstructionSet,
    cross_compiler,
    instruction_sets,
    standalone_sets,
    to_install,
)
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.dataflow import ancestors
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import graph_module, node_named
from fastcar_compile.ir.rewrite import set_outputs
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.support.machine import linker_text
from fastcar_compile.support.values import warn

if TYPE_CHECKING:
    from fastcar_compile.codegen.tvm.build import LoweredModule
import json

from fastcar_compile.artifact.layout import GPU_PROGRAM
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import with_branches


def embedding_graph(program: DecoderProgram) -> HostGraph | None:
    """Return the part of the decode step that makes the input of the first layer; None: it is the decoder's own input.

    Args:
        program: rewritten; it is not changed.
    """
    module = program.graph_module
    entry = node_named(module.graph, program.sites[0].entry)
    if entry.op == "placeholder":
        return None
    needed, graph, made = ancestors(entry), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node in needed:
            # Only what leads to the entry is copied: the session gives this graph's inputs alone.
            made[node] = graph.node_copy(node, lambda old: made[old])
    graph.output(())
    set_outputs(graph, [made[entry]])
    return HostGraph(graph_module(module, graph), [EMBEDDED])


def host_variants(names: Sequence[str], board: Target, quant: str) -> list[InstructionSet]:
    """Return the instruction sets that an artifact is to carry libraries for, the best one of each machine first.

    Args:
        names: `host_cpus`. board: a target that is a machine without TVM's runtime has a library too. quant: of the
            weights; see `host_instruction_set`.

    Raises:
        CompileError: an unknown name, or no linker for one of them; all of these at once.
    """
    variants = instruction_sets([*names, *(isa.name for isa in standalone_sets(board.host_triple))], quant)
    machine = f"{platform.machine()}-linux-gnu"
    problems: list[CompileError] = []
    for isa in variants:
        compiler = cross_compiler(isa.triple, machine)
        if shutil.which(compiler) is None:
            others = [name for name in names if name != isa.name]
            instead = f", or compile without it: host_cpus={others}" if others and isa.name in names else ""
            what = f"{compiler} is not on PATH, so no library for {isa.name} can be linked"
            problems.append(CompileError(what, where="host_cpus", hint=f"{to_install(isa.triple, machine)}{instead}"))
    CompileError.raise_all(problems)
    return variants


class TvmEmitter:
    """Lowers to CPUs: the context's instruction sets, and for an FPGA board also the board's own CPU.

    A library has the decode step, the prefill chunk, and with cross-attention what makes its states; with an
    accelerator also the decode step that calls it, or the embedding where it runs whole steps.
    """

    def emit(self, program: DecoderProgram, context: EmitContext) -> HostSection:
        """Write the libraries; see Emitter.emit."""
        context.say("lowering with TVM")
        graphs = {"decode": HostGraph(program.graph_module, program.outputs)}
        if program.prefill is not None:
            graphs["prefill"] = HostGraph(program.prefill, program.prefill_outputs)
        if program.context is not None:
            graphs["context"] = HostGraph(program.context, program.context_outputs)
        accelerator = context.plan.accelerator
        if accelerator is not None and accelerator.step is not None:
            embedding = embedding_graph(program)
            graphs |= {} if embedding is None else {"embed": embedding}
        elif accelerator is not None:
            # On a copy: the library keeps the decode step without an accelerator, too.
            host = program.copied()
            run_pipeline(host, offload_pipeline(context.plan.config.offload))
            graphs["offload"] = HostGraph(host.graph_module, host.outputs)
        host = HostLibraries(context.writer, graphs, context.variants[0], f"{platform.machine()}-linux-gnu")
        variants = tuple(_emit_variant(host, isa) for isa in context.variants)
        target = context.plan.board
        if target.name == "webgpu" or not all(isa.hosted for isa in context.variants):
            for name in WEB_MODULES:
                module = files("fastcar_compile") / "runtime" / "web" / PurePosixPath(name).name
                context.writer.write_text(name, module.read_text(encoding="utf-8"))
        return HostSection(variants=variants, board=emit_board(host, target) if target.kind == "fpga" else None)


@dataclass(frozen=True)
class HostLibraries:
    """What the libraries of a build have in common.

    Args:
        writer: takes files. graphs: by name, as the fields of ProgramsPart.
        first: instruction set that the graphs are imported for. machine: triple of the build machine.
    """

    writer: ArtifactWriter
    graphs: Mapping[str, HostGraph]
    first: InstructionSet
    machine: str

    @cached_property
    def lowered(self) -> LoweredModule:
        """The module for the first instruction set. TVM is imported here: not where the cache has every library."""
        from fastcar_compile.codegen.tvm.build import lower

        # One import serves all libraries: only the kernels of another instruction set are exchanged.
        return lower(self.graphs, self.first)

    @cached_property
    def _inputs(self) -> list[Any]:
        return [{name: graph.to_json() for name, graph in self.graphs.items()}, self.first.to_json()]

    def made(self, library: str, inputs: object, compiler: str, make: Callable[[Path], BaseModel]) -> Any:
        """Write a library as `ArtifactWriter.made` does. inputs: what it is compiled for, as JSON."""
        if self.writer.cache is None:
            return make(self.writer.file(library)).model_dump(mode="json")
        known = [*self._inputs, inputs, linker_text(compiler)]
        return self.writer.made(Kind.LIBRARY, library, known, lambda path: make(path).model_dump(mode="json"))


def _emit_variant(host: HostLibraries, isa: InstructionSet) -> VariantPart:
    library, compiler = host_library(isa.triple, isa.name), cross_compiler(isa.triple, host.machine)

    def make(path: Path) -> VariantPart:
        lowered = host.lowered if isa is host.first else host.lowered.retarget(isa)
        lowered.export(path, compiler, host.writer.scratch)
        flags = tuple(sorted(isa.flags))
        return VariantPart(instruction_set=isa.name, triple=isa.triple, flags=flags, programs=lowered.part(library))

    return VariantPart.model_validate(host.made(library, isa.to_json(), compiler, make))


def emit_board(host: HostLibraries, board: Target) -> BoardPart:
    """Write the library for the board's CPU, or object files where the linker is missing."""
    triple, cpu = board.host_triple, board.host.cpu
    compiler = cross_compiler(triple, host.machine)
    linked = shutil.which(compiler) is not None
    if not linked:
        text = (
            f"{compiler} is not on PATH: the host programs for {triple} are written as object files (.tar), not as "
            f"a library. Install it (Debian: g++-{triple}) and compile again"
        )
        warn(text, log=True)  # no Python warning: no line of the caller's code is to change
    library = board_library(triple, cpu if triple == host.machine else None, linked=linked)

    def make(path: Path) -> BoardPart:
        from fastcar_compile.codegen.tvm.target import board_instruction_set

        isa, lowered = board_instruction_set(cpu, triple), host.lowered
        compiled = lowered.retarget(isa)
        if linked:
            compiled.export(path, compiler, host.writer.scratch)
        else:
            compiled.export_objects(path, host.writer.scratch)
        facts = {"triple": triple, "cpu": cpu, "instruction_set": isa.name, "compiler": compiler, "linked": linked}
        return BoardPart(**facts, programs=lowered.part(library))

    return BoardPart.model_validate(host.made(library, [triple, cpu], compiler, make))


# Target webgpu: the decode step as `gpu/program.json`, beside the libraries of the host.


class GpuEmitter:
    """Lowers the decode step to WGSL where the target is webgpu. A prompt goes through the decode step too."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> None:
        """Write the program; see Emitter.emit."""
        if context.plan.board.name != "webgpu":
            return
        from fastcar_compile.codegen.tvm.gpu.program import program_of

        context.say("lowering to WGSL")
        own = program.copied()  # the graph is given a GPU's types
        check_shaders(program)
        made = program_of(HostGraph(own.graph_module, own.outputs))
        context.writer.write_text(GPU_PROGRAM, json.dumps(made, separators=(",", ":"), sort_keys=True) + "\n")


def check_shaders(program: DecoderProgram) -> None:
    """Raise CompileError with all that shaders do not compute."""
    from fastcar_compile.codegen.tvm.gpu.converters import SHADERLESS, GpuImporter

    problems = list[CompileError]()
    found = dict[str, fx.Node]()
    importer = GpuImporter.for_questions()
    for node in (n for g in with_branches(program.graph_module) for n in g.graph.nodes if n.op == "call_function"):
        if not importer.knows(node.target):
            found.setdefault(str(node.target), node)
    for name, node in found.items():
        hint = next((text for part, text in SHADERLESS.items() if part in name), "use the target cpu or wasm32")
        problems.append(CompileError(f"operator {name} has no shader for webgpu", where=where(node), hint=hint))
    CompileError.raise_all(problems)
