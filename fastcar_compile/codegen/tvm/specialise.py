"""specialise-kernels: kernels that depend on the instruction set are replaced by those of another."""

from __future__ import annotations

import tvm

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.registry import specialise
from fastcar_compile.codegen.tvm.relax_api import module_pass


def specialise_kernels(isa: InstructionSet) -> tvm.transform.Pass:
    """Return the pass that gives a module the kernels of `isa`, so that one import serves every library."""
    return module_pass("specialise-kernels", lambda module: specialise(module, isa))
