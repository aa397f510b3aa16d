"""Integer linears over small shapes: arguments, what the reference gives, and one module with a kernel for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import tvm

import fastcar_compile.ops  # noqa: F401  (registers the operators)
from fastcar_compile.lowering.isa import InstructionSet
from fastcar_compile.lowering.kernels.choice import KERNELS
from fastcar_compile.ops.quant import quantize_rows, quantize_weight, quantize_weight_int4

fastcar = torch.ops.fastcar
KINDS = ("linear_w8a8", "linear_w4a8")
SHAPES = ((1, 17, 191), (2, 9, 256), (3, 4, 129), (5, 3, 64), (9, 5, 300))
"""(m, n, k) with and without tails in every direction."""


@dataclass(frozen=True)
class IntegerCase:
    """One kernel and its sizes."""

    kind: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.m}_{self.n}_{self.k}"

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Of the kernel, the output last and as the reference gives it. A channel has weights of -128, or -8."""
        torch.manual_seed(seed)
        x, weight = torch.randn(self.m, self.k), torch.randn(self.n, self.k) * torch.rand(self.n, 1)
        q, s = quantize_rows(x)
        w, ws = (quantize_weight if self.kind == "linear_w8a8" else quantize_weight_int4)(weight)
        w[0] = -128 if self.kind == "linear_w8a8" else 0x88
        y = getattr(fastcar, self.kind)(x, w, ws, None)
        return [t.numpy() for t in (q, s, w, ws, y)]

    def kernel(self, isa: InstructionSet) -> tvm.tirx.PrimFunc:
        """For an instruction set, under the case's name."""
        kernel = KERNELS[self.kind](self.m, self.n, self.k, isa=isa).with_attr("global_symbol", self.name)
        assert isinstance(kernel, tvm.tirx.PrimFunc)
        return kernel


CASES = tuple(IntegerCase(kind, *shape) for kind in KINDS for shape in SHAPES)


def module(isa: InstructionSet, cases: tuple[IntegerCase, ...] = CASES) -> tvm.IRModule:
    """The cases' kernels."""
    return tvm.IRModule({case.name: case.kernel(isa) for case in cases})
