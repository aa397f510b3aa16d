"""The emitter of target webgpu: the decode step as `gpu/program.json`, beside the host's libraries."""

import json

from torch import fx

from fastcar_compile.artifact.layout import GPU_PROGRAM
from fastcar_compile.codegen.emit import EmitContext
from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import with_branches

TARGET = "webgpu"


class GpuEmitter:
    """Lowers the decode step to WGSL where the target is webgpu. A prompt goes through the decode step too."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> None:
        """Write the program; see Emitter.emit."""
        if context.plan.board.name != TARGET:
            return
        from fastcar_compile.codegen.tvm.gpu.program import program_of

        context.say("lowering to WGSL")
        own = program.copied()  # the graph is given a GPU's types
        check(program)
        made = program_of(HostGraph(own.graph_module, own.outputs))
        context.writer.write_text(GPU_PROGRAM, json.dumps(made, separators=(",", ":"), sort_keys=True) + "\n")


def check(program: DecoderProgram) -> None:
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
