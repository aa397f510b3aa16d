"""Kernels that depend on the instruction set: imported in their portable form, replaced when the target is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import tvm
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels.linear import SMALL_BATCH, linear
from fastcar_compile.lowering.kernels.linear_chunk import linear_chunk
from fastcar_compile.lowering.kernels.linear_w4a8 import linear_w4a8
from fastcar_compile.lowering.kernels.linear_w8a8 import linear_w8a8


def linear_float32(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """x float32 [m, k] by w float32 [n, k]."""
    return (linear if m <= SMALL_BATCH else linear_chunk)(m, n, k, "float32", isa)


def linear_bfloat16(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """x float32 [m, k] by w bfloat16 [n, k]."""
    return (linear if m <= SMALL_BATCH else linear_chunk)(m, n, k, "bfloat16", isa)


KERNELS: dict[str, Callable[..., PrimFunc]] = {
    "linear_bfloat16": linear_bfloat16,
    "linear_float32": linear_float32,
    "linear_w4a8": linear_w4a8,
    "linear_w8a8": linear_w8a8,
}
"""Name -> `kernel(*sizes, isa=...)`; sizes are integers, and the arguments are the same for every instruction set."""

KIND, SIZES = "fastcar.kernel", "fastcar.sizes"


@cache
def portable(kind: str, *sizes: int) -> PrimFunc:
    """The kernel of that kind in its portable form, marked so that `specialise` finds it."""
    kernel = KERNELS[kind](*sizes)
    marked = kernel.with_attrs({KIND: kind, SIZES: list(sizes)})
    assert isinstance(marked, PrimFunc)
    marked.__name__ = kernel.__name__
    return marked


@cache
def _special(kind: str, sizes: tuple[int, ...], isa: InstructionSet) -> PrimFunc:
    return KERNELS[kind](*sizes, isa=isa)


def specialise(module: tvm.IRModule, isa: InstructionSet) -> tvm.IRModule:
    """The module with every marked kernel replaced by the best one of the instruction set."""
    functions = {}
    for variable, function in module.functions_items():
        if isinstance(function, PrimFunc) and function.attrs is not None and KIND in function.attrs:
            function = _special(str(function.attrs[KIND]), tuple(map(int, function.attrs[SIZES])), isa)
        functions[variable] = function
    return tvm.IRModule(functions, attrs=module.attrs)
