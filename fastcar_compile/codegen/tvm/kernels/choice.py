"""Kernels that depend on the instruction set: marked, so that a module for one gets those of another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import tvm
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.attention import attention
from fastcar_compile.codegen.tvm.kernels.attention.attention_chunk import attention_chunk
from fastcar_compile.codegen.tvm.kernels.attention.window import window_attention
from fastcar_compile.codegen.tvm.kernels.cache.cache_write import cache_write, ring_write
from fastcar_compile.codegen.tvm.kernels.gate.gate_scores import cosine_distance, tas_heads
from fastcar_compile.codegen.tvm.kernels.gate.tas import tas
from fastcar_compile.codegen.tvm.kernels.linear.linear import SMALL_BATCH, linear
from fastcar_compile.codegen.tvm.kernels.linear.linear_chunk import linear_chunk
from fastcar_compile.codegen.tvm.kernels.linear.linear_w4a8 import linear_w4a8
from fastcar_compile.codegen.tvm.kernels.linear.linear_w8a8 import linear_w8a8
from fastcar_compile.codegen.tvm.kernels.linear.side_by_side import side_by_side


def linear_float32(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """x float32 [m, k] by w float32 [n, k]."""
    return (linear if m <= SMALL_BATCH else linear_chunk)(m, n, k, "float32", isa)


def linear_bfloat16(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """x float32 [m, k] by w bfloat16 [n, k]."""
    return (linear if m <= SMALL_BATCH else linear_chunk)(m, n, k, "bfloat16", isa)


@dataclass(frozen=True)
class Linear:
    """A kind of linear kernel.

    Args:
        kernel: `kernel(m, n, k, isa=...)`; its first arguments are the rows, its last is the result [m, n].
        shared: how many arguments the rows are.
        rows: the most rows for which its work is one parallel loop; None: any number.
    """

    kernel: Callable[..., PrimFunc]
    shared: int
    rows: int | None


LINEARS: dict[str, Linear] = {
    "linear_bfloat16": Linear(linear_bfloat16, 1, SMALL_BATCH),
    "linear_float32": Linear(linear_float32, 1, SMALL_BATCH),
    "linear_w4a8": Linear(linear_w4a8, 2, None),
    "linear_w8a8": Linear(linear_w8a8, 2, None),
}


def _single(kind: str, m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    return LINEARS[kind].kernel(m, n, k, isa=isa)


def linears(kind: str, m: int, ns: tuple[int, ...], k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Linears of `kind` with the same m rows of k, one of n outputs for each of `ns`, in one kernel.

    The rows, then the weights (and their scales) of each, then the results [m, n].
    """
    kernels = [_single(kind, m, n, k, isa=isa) for n in ns]
    together = side_by_side(kernels, LINEARS[kind].shared)
    together.__name__ = f"{kernels[0].__name__}_x{len(ns)}"
    return together


KERNELS: dict[str, Callable[..., PrimFunc]] = {
    "attention": attention,
    "attention_chunk": attention_chunk,
    "cache_write": cache_write,
    "cosine_distance": cosine_distance,
    "linears": linears,
    "ring_write": ring_write,
    "tas": tas,
    "tas_heads": tas_heads,
    "window_attention": window_attention,
    **{kind: partial(_single, kind) for kind in LINEARS},
}
"""Name -> `kernel(*options, isa=...)`; options are numbers, texts and tuples of these. A kernel takes the same
arguments for every instruction set."""

KIND, OPTIONS = "fastcar.kernel", "fastcar.options"


@cache
def chosen(isa: InstructionSet, kind: str, *options: Any) -> PrimFunc:
    """The kernel of that kind for the instruction set, marked so that `specialise` finds it."""
    kernel = KERNELS[kind](*options, isa=isa)
    marked = kernel.with_attrs({KIND: kind, OPTIONS: json.dumps(options)})
    assert isinstance(marked, PrimFunc)
    marked.__name__ = kernel.__name__
    return marked


@cache
def _special(kind: str, options: str, isa: InstructionSet) -> PrimFunc:
    return KERNELS[kind](*(tuple(o) if isinstance(o, list) else o for o in json.loads(options)), isa=isa)


def specialise(module: tvm.IRModule, isa: InstructionSet) -> tvm.IRModule:
    """The module with every marked kernel replaced by the one of the instruction set, without its marks."""
    functions = {}
    for variable, function in module.functions_items():
        if isinstance(function, PrimFunc) and function.attrs is not None and KIND in function.attrs:
            function = _special(str(function.attrs[KIND]), str(function.attrs[OPTIONS]), isa)
        functions[variable] = function
    return tvm.IRModule(functions, attrs=module.attrs)
