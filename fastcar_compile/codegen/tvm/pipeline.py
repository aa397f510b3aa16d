"""The lowering of one graph to CPUs: every step, in order, on one screen."""

from collections.abc import Mapping, Sequence

import tvm
from torch import fx
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as cpu

import fastcar_compile.codegen.tvm.converters  # noqa: F401  (registers them)
from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.codegen.tvm import fusion, passes
from fastcar_compile.codegen.tvm.flatten import flatten
from fastcar_compile.codegen.tvm.importer import SegmentImporter
from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.draw import draw
from fastcar_compile.codegen.tvm.relax_api import add_draw, add_entry
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.query import output_nodes

FUSIONS: tuple[fusion.GraphStep, ...] = (
    fusion.split_quantized_linears,
    fusion.fuse_norms,
    fusion.fuse_rotary,
    fusion.fuse_quantize,
    fusion.fuse_replay,
)
"""fx -> fx, on the copy of a segment and on its branches. The graph that users inspect keeps the single operators."""


def check_of(entry: str) -> str:
    """Return the name of the function that takes an entry's arguments and only checks their shapes and types."""
    return f"check_{entry}"


def relax_passes(isa: InstructionSet, entries: Sequence[str]) -> list[tvm.transform.Pass]:
    """Return the passes on the imported module."""
    return [
        # Equal quantisations of one input are merged first: matmuls of it then have the very same rows.
        relax.transform.EliminateCommonSubexpr(),
        passes.combine_parallel_matmuls(isa),
        relax.transform.DeadCodeElimination([*entries]),  # the single matmuls' kernels
    ]


def cpu_passes(isa: InstructionSet, entries: Sequence[str]) -> list[tvm.transform.Pass]:
    """Return the passes from the module of `relax_passes` to the virtual machine's instructions."""
    return [
        # The import has the kernels of one instruction set. Those of `isa` take their places before TVM lowers them.
        passes.specialise_kernels(isa),
        relax.transform.ConvertToDataflow(),  # TVM's passes look into dataflow blocks only
        relax.transform.DeadCodeElimination([*entries]),
        *tvm_passes(host_target(isa)),
        # Behind TVM's own passes, when every buffer has a storage; `no_alias` marks the kernels that are left.
        flatten({entry: check_of(entry) for entry in entries}),
        passes.no_alias(),
    ]


def tvm_passes(target: tvm.target.Target) -> list[tvm.transform.Pass]:
    """Return TVM's own passes for CPUs, as its default pipeline runs them."""
    return [
        *cpu.library_dispatch_passes(target),
        *cpu.legalize_passes(target),
        # After legalisation, when elementwise operators are kernels, and before buffers are planned.
        passes.schedule_elementwise(),
        *cpu.dataflow_lower_passes(target),
        *cpu.finalize_passes(target),
    ]


def import_graphs(entries: Mapping[str, HostGraph], isa: InstructionSet) -> tvm.IRModule:
    """Return the Relax module of graphs: a function for each distinct segment of them, fused, and the entries.

    Most segments of a decode step that calls the accelerator are those of the other one, and of the rest most kernels.
    """
    builder = relax.BlockBuilder()
    importer = SegmentImporter(builder, isa)
    functions: dict[str, tvm.ir.GlobalVar] = {}
    for part in (part for entry in entries.values() for part in entry.segments):
        # Equal layers have one key. The first of them is imported, on a copy that the fusions may rewrite.
        if part.key not in functions:
            fused = fuse(part.copy())
            functions[part.key] = importer.add_function(fused, f"segment_{len(functions)}", len(part.literals))
    for name, entry in entries.items():
        add_entry(builder, name, entry.module, entry.segments, functions)
    names = [*entries]
    if "decode" in entries:
        rows, _, vocabulary = output_nodes(entries["decode"].module.graph)[0].meta["val"].shape
        add_draw(builder, draw(rows, vocabulary))
        names.append("draw")
    return tvm.transform.Sequential(relax_passes(isa, names))(builder.finalize())


def fuse(module: fx.GraphModule) -> fx.GraphModule:
    """Run the fusions on a graph and on its branches; returns the graph."""
    # Branches of a `cond` hold the MLP, so the fusions run on them, too.
    for graph in [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for step in FUSIONS:
            step(graph)
        graph.eliminate_dead_code()
    return module


def flat_module(module: tvm.IRModule, isa: InstructionSet, entries: Sequence[str]) -> tvm.IRModule:
    """Return an imported module before the virtual machine's instructions are made: its kernels and flat entries."""
    with host_target(isa):
        return tvm.transform.Sequential(cpu_passes(isa, entries))(module)


def kernel_context() -> tvm.transform.PassContext:
    """Return what kernels are built in."""
    # They do not check their arguments: that code was twice the kernels' own. `check_of` checks those of the entries,
    # and all others are buffers that an entry makes itself. Nor are buffers shrunk to the part that is used: it took a
    # tenth of a build, and most libraries have the same bytes without it.
    return tvm.transform.PassContext(
        config={"tirx.disable_assert": True}, disabled_pass=["s_tir.CompactBufferAllocation"]
    )


def compile_module(module: tvm.IRModule, isa: InstructionSet, entries: Sequence[str]) -> relax.VMExecutable:
    """Return the virtual machine's executable of an imported module, with the kernels of an instruction set."""
    with kernel_context():
        steps = tvm.transform.Sequential(cpu_passes(isa, entries))
        executable = tvm.compile(module, target=host_target(isa), relax_pipeline=steps)
    assert isinstance(executable, relax.VMExecutable)
    return executable
