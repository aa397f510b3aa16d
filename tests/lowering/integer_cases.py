"""Integer linears over small shapes: arguments, what the reference gives, and one module with a kernel for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
import tvm

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.registry import KERNELS
from fastcar_compile.ir.ops.linear import quantize_rows, quantize_weight, quantize_weight_int4

from .kernel_runs import named

fastcar = torch.ops.fastcar
KINDS = ("linear_w8a8", "linear_w4a8")
SHAPES = (
    *((1, 17, 191), (1, 6, 448), (2, 9, 256), (3, 4, 129), (5, 3, 64), (9, 5, 300)),
    *((21, 19, 324), (53, 9, 132), (7, 53, 260), (19, 53, 260), (11, 13, 272)),
    *((13, 29, 192), (27, 18, 128), (75, 69, 192), (16, 70, 1280), (40, 33, 1344)),
)
"""(m, n, k) with and without tails in every direction; 448 is four groups of int4. 53 rows are four vectors of them.
Seven rows are multiplied with quads of weight rows, which are 48 or more. Of eleven rows one is inactive, and 272 is 17
vectors of 16. The last five have whole cache lines: their rows are blocks of four and of 16 with AVX-512, and of the
last three tiles of AMX, in one part of the reduction and in two."""


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
        if self.m == 11:
            x[2] = 0
        q, s = quantize_rows(x)
        w, ws = (quantize_weight if self.kind == "linear_w8a8" else quantize_weight_int4)(weight)
        w[0] = -128 if self.kind == "linear_w8a8" else 0x88
        y = getattr(fastcar, self.kind)(x, w, ws, None)
        return [t.numpy() for t in (q, s, w, ws, y)]

    def kernel(self, isa: InstructionSet) -> tvm.tirx.PrimFunc:
        """For an instruction set, under the case's name."""
        return named(KERNELS[self.kind](self.m, self.n, self.k, isa=isa), self.name)


@dataclass(frozen=True)
class TogetherCase:
    """Several linears of the same rows in one kernel."""

    kind: str
    m: int
    ns: tuple[int, ...]
    k: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.m}_{'_'.join(map(str, self.ns))}_{self.k}"

    @property
    def results(self) -> int:
        """How many of the last arguments are results."""
        return len(self.ns)

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """As of single kernels that share the rows of the first."""
        singles = [IntegerCase(self.kind, self.m, n, self.k).arguments(seed) for n in self.ns]
        return [*singles[0][:2], *(a for single in singles for a in single[2:4]), *(single[4] for single in singles)]

    def kernel(self, isa: InstructionSet) -> tvm.tirx.PrimFunc:
        """For an instruction set, under the case's name."""
        return named(KERNELS["linears"](self.kind, self.m, self.ns, self.k, isa=isa), self.name)


@dataclass(frozen=True)
class RoundedCase:
    """A linear with bfloat16 weights whose rows are rounded to bfloat16. Products and sums are exact in float32."""

    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"linear_bfloat16_{self.m}_{self.n}_{self.k}"

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """As of `IntegerCase`. Odd integers above 256 lie between two bfloat16."""
        rng = np.random.default_rng(seed)
        x = rng.integers(-600, 601, (self.m, self.k)).astype(np.float32)
        w = rng.integers(-3, 4, (self.n, self.k)).astype(ml_dtypes.bfloat16)
        return [x, w, x.astype(ml_dtypes.bfloat16).astype(np.float32) @ w.astype(np.float32).T]

    def kernel(self, isa: InstructionSet) -> tvm.tirx.PrimFunc:
        """For an instruction set, under the case's name."""
        return named(KERNELS["linear_bfloat16"](self.m, self.n, self.k, isa=isa), self.name)


ROUNDED = tuple(RoundedCase(*shape) for shape in ((9, 33, 64), (17, 32, 32), (40, 100, 2080), (70, 130, 96)))
"""Several panels of weight rows, tiles that overlap, odd blocks of rows, and a reduction of two parts."""


CASES = tuple(IntegerCase(kind, *shape) for kind in KINDS for shape in SHAPES)
QUICK = tuple(IntegerCase(KINDS[i % 2], *shape) for i, shape in enumerate(SHAPES) if i not in (9, 12, 13))
"""Shapes of every kind in one of the formats."""
TOGETHER = tuple(
    TogetherCase(kind, *shape) for kind in KINDS for shape in ((1, (257, 3, 300), 2041), (3, (101, 90), 1999))
)
"""Large enough for a parallel loop, but for the linear of three channels."""


def module(isa: InstructionSet, cases: Sequence[IntegerCase | TogetherCase | RoundedCase] = CASES) -> tvm.IRModule:
    """The cases' kernels."""
    return tvm.IRModule({case.name: case.kernel(isa) for case in cases})
