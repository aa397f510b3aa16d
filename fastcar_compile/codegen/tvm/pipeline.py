"""The lowering of one graph to CPUs: every step, in order, on one screen."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from torch import fx
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as cpu

from fastcar_compile.codegen.segment import Segment
from fastcar_compile.codegen.tvm.combine_matmuls import combine_parallel_matmuls
from fastcar_compile.codegen.tvm.entry import add_entry
from fastcar_compile.codegen.tvm.flatten import flatten
from fastcar_compile.codegen.tvm.fusion.norms import fuse_norms
from fastcar_compile.codegen.tvm.fusion.quantize import fuse_quantize
from fastcar_compile.codegen.tvm.fusion.rewrite import GraphStep
from fastcar_compile.codegen.tvm.fusion.rotary import fuse_rotary
from fastcar_compile.codegen.tvm.fusion.split_linears import split_quantized_linears
from fastcar_compile.codegen.tvm.importer import SegmentImporter
from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.specialise import specialise_kernels
from fastcar_compile.codegen.tvm.target import host_target

ENTRY = "run"
"""Name of the function in the library."""

CHECK = "check"
"""Name of the function that takes the same arguments and only checks their shapes and types."""

FUSIONS: tuple[GraphStep, ...] = (
    split_quantized_linears,
    fuse_norms,
    fuse_rotary,
    fuse_quantize,
)
"""fx -> fx, on the copy of a segment and on its branches. The graph that users inspect keeps the single operators."""


def relax_passes(isa: InstructionSet) -> list[tvm.transform.Pass]:
    """Return the passes on the imported module."""
    return [
        relax.transform.EliminateCommonSubexpr(),
        combine_parallel_matmuls(isa),
        relax.transform.DeadCodeElimination([ENTRY]),  # the single matmuls' kernels
    ]


def cpu_passes(isa: InstructionSet) -> list[tvm.transform.Pass]:
    """Return the passes from the module of `relax_passes` to the virtual machine's instructions."""
    return [
        specialise_kernels(isa),
        relax.transform.ConvertToDataflow(),  # TVM's passes look into dataflow blocks only
        relax.transform.DeadCodeElimination([ENTRY]),
        *tvm_passes(host_target(isa)),
        flatten(ENTRY, CHECK),
    ]


def tvm_passes(target: tvm.target.Target) -> list[tvm.transform.Pass]:
    """Return TVM's own passes for CPUs, as its default pipeline runs them."""
    return [
        *cpu.library_dispatch_passes(target),
        *cpu.legalize_passes(target),
        *cpu.dataflow_lower_passes(target),
        *cpu.finalize_passes(target),
    ]


def import_graph(module: fx.GraphModule, segments: Sequence[Segment], isa: InstructionSet) -> tvm.IRModule:
    """Return the Relax module of a graph: a function for each distinct segment, fused, and the entry."""
    builder = relax.BlockBuilder()
    importer = SegmentImporter(builder, isa)
    functions: dict[str, tvm.ir.GlobalVar] = {}
    for part in segments:
        if part.key not in functions:
            fused = fuse(part.copy())
            functions[part.key] = importer.add_function(fused, f"segment_{len(functions)}", len(part.literals))
    add_entry(builder, ENTRY, module, segments, functions)
    return tvm.transform.Sequential(relax_passes(isa))(builder.finalize())


def fuse(module: fx.GraphModule) -> fx.GraphModule:
    """Run the fusions on a graph and on its branches; returns the graph."""
    for graph in [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for step in FUSIONS:
            step(graph)
        graph.eliminate_dead_code()
    return module


def compile_module(module: tvm.IRModule, isa: InstructionSet) -> relax.VMExecutable:
    """Return the virtual machine's executable of an imported module, with the kernels of an instruction set.

    Kernels do not check their arguments: that code was twice the kernels' own. The function `check` checks those of the
    entry, and all others are buffers that the entry makes itself.
    """
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        steps = tvm.transform.Sequential(cpu_passes(isa))
        executable = tvm.compile(module, target=host_target(isa), relax_pipeline=steps)
    assert isinstance(executable, relax.VMExecutable)
    return executable
