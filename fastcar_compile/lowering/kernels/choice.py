"""Kernels that depend on the instruction set: imported in their portable form, replaced when the target is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import tvm
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels.attention import attention
from fastcar_compile.lowering.kernels.attention_chunk import attention_chunk
from fastcar_compile.lowering.kernels.cache_write import cache_write, ring_write
from fastcar_compile.lowering.kernels.gate_scores import cosine_distance, tas_heads
from fastcar_compile.lowering.kernels.linear import SMALL_BATCH, linear
from fastcar_compile.lowering.kernels.linear_chunk import linear_chunk
from fastcar_compile.lowering.kernels.linear_w4a8 import linear_w4a8
from fastcar_compile.lowering.kernels.linear_w8a8 import linear_w8a8
from fastcar_compile.lowering.kernels.tas import tas
from fastcar_compile.lowering.kernels.window import window_attention


def linear_float32(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """x float32 [m, k] by w float32 [n, k]."""
    return (linear if m <= SMALL_BATCH else linear_chunk)(m, n, k, "float32", isa)


def linear_bfloat16(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """x float32 [m, k] by w bfloat16 [n, k]."""
    return (linear if m <= SMALL_BATCH else linear_chunk)(m, n, k, "bfloat16", isa)


KERNELS: dict[str, Callable[..., PrimFunc]] = {
    "attention": attention,
    "attention_chunk": attention_chunk,
    "cache_write": cache_write,
    "cosine_distance": cosine_distance,
    "linear_bfloat16": linear_bfloat16,
    "linear_float32": linear_float32,
    "linear_w4a8": linear_w4a8,
    "linear_w8a8": linear_w8a8,
    "ring_write": ring_write,
    "tas": tas,
    "tas_heads": tas_heads,
    "window_attention": window_attention,
}
"""Name -> `kernel(*options, isa=...)`; options are numbers, texts and tuples of these. A kernel takes the same
arguments for every instruction set."""

KIND, OPTIONS = "fastcar.kernel", "fastcar.options"


@cache
def portable(kind: str, *options: Any) -> PrimFunc:
    """The kernel of that kind in its portable form, marked so that `specialise` finds it."""
    kernel = KERNELS[kind](*options)
    marked = kernel.with_attrs({KIND: kind, OPTIONS: json.dumps(options)})
    assert isinstance(marked, PrimFunc)
    marked.__name__ = kernel.__name__
    return marked


@cache
def _special(kind: str, options: str, isa: InstructionSet) -> PrimFunc:
    return KERNELS[kind](*(tuple(o) if isinstance(o, list) else o for o in json.loads(options)), isa=isa)


def specialise(module: tvm.IRModule, isa: InstructionSet) -> tvm.IRModule:
    """The module with every marked kernel replaced by the best one of the instruction set."""
    functions = {}
    for variable, function in module.functions_items():
        if isinstance(function, PrimFunc) and function.attrs is not None and KIND in function.attrs:
            function = _special(str(function.attrs[KIND]), str(function.attrs[OPTIONS]), isa)
        functions[variable] = function
    return tvm.IRModule(functions, attrs=module.attrs)
