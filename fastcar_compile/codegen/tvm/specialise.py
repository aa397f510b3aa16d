"""specialise-kernels: kernels that depend on the instruction set are replaced by those of another."""

from __future__ import annotations

import tvm

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.registry import specialise


def specialise_kernels(isa: InstructionSet) -> tvm.transform.Pass:
    """Return the pass that gives a module the kernels of `isa`. An imported module becomes any library this way."""

    @tvm.transform.module_pass(opt_level=0)
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return specialise(module, isa)

    return run
