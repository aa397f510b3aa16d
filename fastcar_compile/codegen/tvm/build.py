"""fx graph -> virtual machine executable. Parameters and state are arguments, paired by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tvm
from torch import fx
from tvm import relax

from fastcar_compile.artifact.sections import ProgramPart
from fastcar_compile.codegen.segment import Segment, segment
from fastcar_compile.codegen.tvm.entry import parameters
from fastcar_compile.codegen.tvm.fusion.split_linears import QUANTIZED_LINEARS
from fastcar_compile.codegen.tvm.importer import SegmentImporter
from fastcar_compile.codegen.tvm.isa import InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.link import link_library, pack_objects
from fastcar_compile.codegen.tvm.pipeline import compile_module, import_graph
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import Role, role_of
from fastcar_compile.ir.provenance import where


@dataclass(frozen=True)
class LoweredModule:
    """A compiled graph.

    Attributes:
        executable: the virtual machine's executable with the function `run`.
        inputs: names of the first arguments, in order: the graph's placeholders, state among them.
        params: names of the arguments after them.
        outputs: result names in order. A state result is the argument tensor, updated in place.
        distinct_layers: how many layer functions were compiled.
        ir_module: the Relax module before TVM's CPU pipeline, its kernels those of the first instruction set.
    """

    executable: relax.VMExecutable
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    distinct_layers: int
    ir_module: tvm.IRModule

    def program(self, library: str) -> ProgramPart:
        """Return what the runtime needs to call the module, exported as `library`."""
        return ProgramPart(library=library, inputs=self.inputs, params=self.params, outputs=self.outputs)

    def export(self, path: Path, compiler: str = "g++", scratch: Path | None = None) -> None:
        """Write the shared library, linked by `compiler`; see `link_library`."""
        link_library(self.executable, path, compiler, scratch)

    def export_objects(self, path: Path, scratch: Path | None = None) -> None:
        """Write the object files that the shared library is linked from, as a .tar. Same module, same bytes."""
        pack_objects(self.executable, path, scratch)

    def retarget(self, isa: InstructionSet) -> LoweredModule:
        """Return the module compiled for another CPU, with the kernels for it."""
        return replace(self, executable=compile_module(self.ir_module, isa))


def lower(
    module: fx.GraphModule,
    outputs: Sequence[str],
    isa: InstructionSet | None = None,
) -> LoweredModule:
    """Lower a decode step or a prefill chunk to a CPU.

    Args:
        module: fx graph.
        outputs: names of its results.
        isa: instruction set; default: the best one of this machine.

    Raises:
        CompileError: operators that TVM cannot import, all of them.
    """
    isa = isa or host_instruction_set()
    _check_operators(module, isa)
    segments = segment(module)
    ir_module = import_graph(module, segments, isa)
    return LoweredModule(
        executable=compile_module(ir_module, isa),
        inputs=tuple(str(n.target) for n in module.graph.find_nodes(op="placeholder")),
        params=tuple(parameters(segments)),
        outputs=tuple(outputs),
        distinct_layers=_distinct_layers(segments),
        ir_module=ir_module,
    )


def _check_operators(module: fx.GraphModule, isa: InstructionSet) -> None:
    """Raise CompileError with every operator that has no lowering, and where it comes from."""
    importer = SegmentImporter(relax.BlockBuilder(), isa)
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function"]
    unknown = [n for n in nodes if n.target not in QUANTIZED_LINEARS and not importer.knows(n.target)]
    if unknown:
        problems = [CompileError(f"operator {n.target} has no TVM lowering", where=where(n)) for n in unknown]
        raise CompileError.collect(problems)


def _distinct_layers(segments: Sequence[Segment]) -> int:
    return len({part.key for part in segments if any(role_of(n) == Role.EXIT for n in part.part.nodes)})
