"""fx graphs -> virtual machine executable. Parameters and state are arguments, paired by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tvm
from torch import fx
from tvm import relax

from fastcar_compile.artifact.sections import ProgramPart, ProgramsPart
from fastcar_compile.codegen.segment import Segment, segment
from fastcar_compile.codegen.tvm.entry import parameters
from fastcar_compile.codegen.tvm.fusion.split_linears import QUANTIZED_LINEARS
from fastcar_compile.codegen.tvm.importer import SegmentImporter
from fastcar_compile.codegen.tvm.isa import InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.link import link_library, pack_objects
from fastcar_compile.codegen.tvm.pipeline import Entry, check_of, compile_module, import_graphs
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import Role, role_of
from fastcar_compile.ir.provenance import where


@dataclass(frozen=True)
class HostGraph:
    """A decode step or a prefill chunk.

    Attributes:
        module: fx graph.
        outputs: names of its results.
    """

    module: fx.GraphModule
    outputs: Sequence[str]


@dataclass(frozen=True)
class LoweredModule:
    """Compiled graphs.

    Attributes:
        executable: the virtual machine's executable. Every graph is a function in it, and equal kernels are one.
        programs: name of a graph -> how to call it. A state result is the argument tensor, updated in place.
        distinct_layers: how many layer functions were compiled.
        ir_module: the Relax module before TVM's CPU pipeline, its kernels those of the first instruction set.
    """

    executable: relax.VMExecutable
    programs: Mapping[str, ProgramPart]
    distinct_layers: int
    ir_module: tvm.IRModule

    def part(self, library: str) -> ProgramsPart:
        """Return what the runtime needs to call the module, exported as `library`."""
        return ProgramsPart(library=library, **self.programs)

    def export(self, path: Path, compiler: str = "g++", scratch: Path | None = None) -> None:
        """Write the shared library, linked by `compiler`; see `link_library`."""
        link_library(self.executable, path, compiler, scratch)

    def export_objects(self, path: Path, scratch: Path | None = None) -> None:
        """Write the object files that the shared library is linked from, as a .tar. Same module, same bytes."""
        pack_objects(self.executable, path, scratch)

    def retarget(self, isa: InstructionSet) -> LoweredModule:
        """Return the module compiled for another CPU, with the kernels for it."""
        return replace(self, executable=compile_module(self.ir_module, isa, [*self.programs]))


def lower(graphs: Mapping[str, HostGraph], isa: InstructionSet | None = None) -> LoweredModule:
    """Lower graphs to a CPU, as functions of one library.

    Args:
        graphs: by name, as the fields of ProgramsPart.
        isa: instruction set; default: the best one of this machine.

    Raises:
        CompileError: operators that TVM cannot import, all of them.
    """
    isa = isa or host_instruction_set()
    # Before anything is imported, so that one error names every operator that has no lowering.
    _check_operators([graph.module for graph in graphs.values()], isa)
    entries = {name: Entry(graph.module, segment(graph.module)) for name, graph in graphs.items()}
    ir_module = import_graphs(entries, isa)
    return LoweredModule(
        executable=compile_module(ir_module, isa, [*entries]),
        programs={name: _program(name, entry, graphs[name].outputs) for name, entry in entries.items()},
        distinct_layers=_distinct_layers([part for entry in entries.values() for part in entry.segments]),
        ir_module=ir_module,
    )


def _program(name: str, entry: Entry, outputs: Sequence[str]) -> ProgramPart:
    return ProgramPart(
        function=name,
        check=check_of(name),
        inputs=tuple(str(n.target) for n in entry.module.graph.find_nodes(op="placeholder")),
        params=tuple(parameters(entry.segments)),
        outputs=tuple(outputs),
    )


def _check_operators(modules: Sequence[fx.GraphModule], isa: InstructionSet) -> None:
    """Raise CompileError with every operator that has no lowering, and where it comes from."""
    importer = SegmentImporter(relax.BlockBuilder(), isa)
    graphs = [m.graph for module in modules for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function"]
    # Quantised linears have no converter: the fusion `split_quantized_linears` replaces them before the import.
    unknown = [n for n in nodes if n.target not in QUANTIZED_LINEARS and not importer.knows(n.target)]
    if unknown:
        problems = [CompileError(f"operator {n.target} has no TVM lowering", where=where(n)) for n in unknown]
        raise CompileError.collect(problems)


def _distinct_layers(segments: Sequence[Segment]) -> int:
    return len({part.key for part in segments if any(role_of(n) == Role.EXIT for n in part.part.nodes)})
