"""The registry of kernels that depend on the instruction set.

`dispatch` marks a kernel with its kind and options. `specialise` reads the marks, and replaces every marked kernel of a
module by the kernel of the same kind and options for another instruction set. So a module is imported once and built
for several CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import tvm
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.chunk import chunk_attention
from fastcar_compile.codegen.tvm.kernels.attention.decode import decode_attention
from fastcar_compile.codegen.tvm.kernels.attention.exact import exact_attention
from fastcar_compile.codegen.tvm.kernels.attention.window import window_attention
from fastcar_compile.codegen.tvm.kernels.cache.cache_write import cache_write, ring_write
from fastcar_compile.codegen.tvm.kernels.gate.scores import output_bound
from fastcar_compile.codegen.tvm.kernels.gate.tas import tas, tas_heads
from fastcar_compile.codegen.tvm.kernels.linear.combine import combine
from fastcar_compile.codegen.tvm.kernels.linear.float_gemm import float_gemm
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import SMALL_BATCH, float_gemv
from fastcar_compile.codegen.tvm.kernels.linear.linear_w4a8 import linear_w4a8
from fastcar_compile.codegen.tvm.kernels.linear.linear_w8a8 import linear_w8a8
from fastcar_compile.codegen.tvm.kernels.linear.weight_type import WeightType

Kernel = Callable[..., PrimFunc]
"""`kernel(*options, isa=...)`. Options are numbers, texts and tuples of these. The kernel takes the same arguments for
every instruction set."""


def _float_linear(dtype: WeightType, m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    return (float_gemv if m <= SMALL_BATCH else float_gemm)(m, n, k, dtype, isa)


@dataclass(frozen=True)
class LinearKernel:
    """One kind of linear kernel.

    Args:
        kernel: `kernel(m, n, k, isa=...)`. Its first arguments are the activations, its last is the result [m, n].
        activations: how many arguments the activations are.
        max_rows: the largest m whose kernel is one parallel loop, so that `combine` takes it. None: every m.
    """

    kernel: Kernel
    activations: int
    max_rows: int | None


LINEARS: dict[str, LinearKernel] = {
    "linear_bfloat16": LinearKernel(partial(_float_linear, "bfloat16"), activations=1, max_rows=SMALL_BATCH),
    "linear_float32": LinearKernel(partial(_float_linear, "float32"), activations=1, max_rows=SMALL_BATCH),
    "linear_w4a8": LinearKernel(linear_w4a8, activations=2, max_rows=None),
    "linear_w8a8": LinearKernel(linear_w8a8, activations=2, max_rows=None),
}


def combined_linears(kind: str, m: int, ns: tuple[int, ...], k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return one kernel for parallel linears of `kind`: the same activations [m, k], one result [m, n] per n in `ns`.

    Its arguments are the activations, then the weights (and scales) of each linear, then the results.
    """
    linear = LINEARS[kind]
    kernels: list[Any] = [linear.kernel(m, n, k, isa=isa) for n in ns]
    combined: Any = combine(kernels, linear.activations)
    combined.__name__ = f"{kernels[0].__name__}_x{len(ns)}"
    return combined


KERNELS: dict[str, Kernel] = {
    "attention": decode_attention,
    "attention_chunk": chunk_attention,
    "cache_write": cache_write,
    "exact_attention": exact_attention,
    "linears": combined_linears,
    "output_bound": output_bound,
    "ring_write": ring_write,
    "tas": tas,
    "tas_heads": tas_heads,
    "window_attention": window_attention,
    **{kind: linear.kernel for kind, linear in LINEARS.items()},
}
"""Kind -> kernel. A kernel reads what it needs from the traits of the `InstructionSet`: `int8` selects an entry of
INT8_DOTS and INT4_DOTS, `float_lanes` and `machine` set the tile sizes, `float16` selects a conversion."""

KIND, OPTIONS = "fastcar.kernel", "fastcar.options"
"""The attributes of a marked kernel."""


@cache
def dispatch(isa: InstructionSet, kind: str, *options: Any) -> PrimFunc:
    """Return the kernel of that kind for the instruction set, with the marks that `specialise` reads."""
    kernel: Any = KERNELS[kind](*options, isa=isa)
    marked: Any = kernel.with_attrs({KIND: kind, OPTIONS: json.dumps(options)})
    marked.__name__ = kernel.__name__
    return marked


@cache
def _unmarked(kind: str, options: str, isa: InstructionSet) -> PrimFunc:
    return KERNELS[kind](*(tuple(o) if isinstance(o, list) else o for o in json.loads(options)), isa=isa)


def specialise(module: Any, isa: InstructionSet) -> tvm.IRModule:
    """Return the module with the kernel of `isa` in place of every marked kernel, without the marks."""
    functions = {}
    for variable, function in module.functions_items():
        if isinstance(function, PrimFunc) and function.attrs is not None and KIND in function.attrs:
            function = _unmarked(str(function.attrs[KIND]), str(function.attrs[OPTIONS]), isa)
        functions[variable] = function
    return tvm.IRModule(functions, attrs=module.attrs)
