"""A network whose sums are exact in any order, so that kernels can be compared bit for bit on every instruction set."""

from dataclasses import dataclass

import numpy as np
import torch
from ml_dtypes import bfloat16
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.learned_score import learned_score


@dataclass(frozen=True)
class LearnedCase:
    """Small integers for everything; rows, width and units of the network."""

    name: str
    rows: int
    width: int
    units: int

    def kernel(self, _isa: InstructionSet) -> PrimFunc:
        """The same for every instruction set."""
        kernel = learned_score(self.rows, self.width, self.units).with_attr("global_symbol", self.name)
        assert isinstance(kernel, PrimFunc)
        return kernel

    def arguments(self) -> list[np.ndarray]:
        """Of the kernel, the output last and as the reference gives it."""
        generator = np.random.default_rng(self.width)

        def integers(*shape: int) -> np.ndarray:
            return generator.integers(-8, 9, shape).astype(np.float32)

        x, cached = integers(self.rows, self.width), integers(self.rows, self.width)
        w1 = integers(self.units, 2 * self.width)
        inputs = [x, cached, w1, integers(self.units), integers(self.units), integers(1)]
        tensors = [torch.from_numpy(a) for a in inputs]
        tensors[2] = tensors[2].bfloat16()
        expected = torch.ops.fastcar.learned_score(*tensors).numpy()
        inputs[2] = w1.astype(bfloat16)
        return [*inputs, expected]


CASES = (LearnedCase("learned_one", 1, 64, 16), LearnedCase("learned_tail", 3, 37, 5))
