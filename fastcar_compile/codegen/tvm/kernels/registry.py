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
from fastcar_compile.codegen.tvm.kernels.attention.decode import decode_attention, window_attention
from fastcar_compile.codegen.tvm.kernels.attention.exact import exact_attention
from fastcar_compile.codegen.tvm.kernels.cache import cache_write, ring_write
from fastcar_compile.codegen.tvm.kernels.gate import output_bound
from fastcar_compile.codegen.tvm.kernels.linear.activations import activate_quantize, activation_factor
from fastcar_compile.codegen.tvm.kernels.linear.float_gemm import float_gemm
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import SMALL_BATCH, WeightType, combine, float_gemv
from fastcar_compile.codegen.tvm.kernels.linear.gemm_w4a8 import FEW, TILE, gemm_w4a8, pairs_w4a8
from fastcar_compile.codegen.tvm.kernels.linear.gemm_w8a8 import gemm_w8a8
from fastcar_compile.codegen.tvm.kernels.linear.rows import holds
from fastcar_compile.codegen.tvm.kernels.linear.w4a8 import linear_w4a8
from fastcar_compile.codegen.tvm.kernels.linear.w8a8 import linear_w8a8
from fastcar_compile.codegen.tvm.kernels.tas import tas, tas_heads

Kernel = Callable[..., PrimFunc]
"""`kernel(*options, isa=...)`. Options are numbers, texts and tuples of these. The kernel takes the same arguments for
every instruction set."""


def _float_linear(dtype: WeightType, m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    # Measured: a vector of eight rows or more is worth its padding from six rows on.
    few = 5 if isa.float_lanes >= SMALL_BATCH else SMALL_BATCH
    return (float_gemv if m <= few else float_gemm)(m, n, k, dtype, isa)


def _int8_linear(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    # Measured: up to 8 rows, dot products along the reduction are as fast.
    return (gemm_w8a8 if m > SMALL_BATCH and holds(n, k, isa) else linear_w8a8)(m, n, k, isa)


def _int4_linear(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    # pairs_w4a8 pads the active rows to eight and takes 24 weight rows a tile. Up to FEW rows that padding costs more.
    if m <= FEW or n < TILE or not holds(n, k, isa):
        return linear_w4a8(m, n, k, isa)
    # Up to eight rows of x share a vector with two weight rows; more rows of x fill vectors of 16.
    return (pairs_w4a8 if m <= SMALL_BATCH else gemm_w4a8)(m, n, k, isa)


@dataclass(frozen=True)
class LinearKernel:
    """One kind of linear kernel.

    Args:
        kernel: `kernel(m, n, k, isa=...)`. Its first arguments are the activations, its last is the result [m, n].
        activations: how many arguments the activations are.
        max_rows: the largest m whose kernel is one parallel loop, so that `combine` takes it.
    """

    kernel: Kernel
    activations: int
    max_rows: int


LINEARS: dict[str, LinearKernel] = {
    "linear_bfloat16": LinearKernel(partial(_float_linear, "bfloat16"), activations=1, max_rows=SMALL_BATCH),
    "linear_float32": LinearKernel(partial(_float_linear, "float32"), activations=1, max_rows=SMALL_BATCH),
    "linear_w4a8": LinearKernel(_int4_linear, activations=2, max_rows=SMALL_BATCH),
    "linear_w8a8": LinearKernel(_int8_linear, activations=2, max_rows=SMALL_BATCH),
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
    "activate_quantize": activate_quantize,
    "activation_factor": activation_factor,
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
    # with_attrs copies: the cached kernel stays unmarked.
    marked: Any = kernel.with_attrs({KIND: kind, OPTIONS: json.dumps(options)})
    marked.__name__ = kernel.__name__
    return marked


@cache
def _unmarked(kind: str, options: str, isa: InstructionSet) -> PrimFunc:
    # JSON turns tuples into lists. Options are tuples again, because the kernels are cached by their options.
    return KERNELS[kind](*(tuple(o) if isinstance(o, list) else o for o in json.loads(options)), isa=isa)


def specialise(module: Any, isa: InstructionSet) -> tvm.IRModule:
    """Return the module with the kernel of `isa` in place of every marked kernel, without the marks."""
    functions = {}
    for variable, function in module.functions_items():
        if isinstance(function, PrimFunc) and function.attrs is not None and KIND in function.attrs:
            # A kernel of another instruction set takes the same arguments, so call sites stay as they are.
            function = _unmarked(str(function.attrs[KIND]), str(function.attrs[OPTIONS]), isa)
        functions[variable] = function
    return tvm.IRModule(functions, attrs=module.attrs)
