"""Compile one kernel and call it."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from hypothesis import settings
from torch import Tensor
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet, cpu_flags, runnable
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.ops.linear import quantize_rows

few = settings(max_examples=int(os.environ.get("FASTCAR_KERNEL_EXAMPLES", "3")), deadline=None, derandomize=True)
HERE = runnable(INSTRUCTION_SETS, platform.machine(), cpu_flags())


def needs(isa: InstructionSet) -> None:
    """Skip a test of kernels that this CPU cannot run."""
    if lacking := sorted(isa.flags - cpu_flags()):
        pytest.skip(f"this CPU has no {', '.join(lacking)}")


def name_of(dtype: torch.dtype) -> str:
    """TVM's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def same_rows(found: list[Tensor], rows: Tensor) -> None:
    """The last two tensors are the quantised rows and their scales."""
    for actual, expected in zip(found[-2:], quantize_rows(rows), strict=True):
        assert torch.equal(actual, expected)


def named(kernel: Any, name: str) -> PrimFunc:
    """Return a kernel under the name by which a library has it."""
    return kernel.with_attr("global_symbol", name)


@dataclass(frozen=True)
class KernelCase:
    """A kernel and its arguments, the output last and as the reference gives it."""

    name: str
    make: Callable[[InstructionSet], PrimFunc]
    arguments: Callable[[], list[np.ndarray]]

    def kernel(self, isa: InstructionSet) -> PrimFunc:
        """For an instruction set, under the case's name."""
        return named(self.make(isa), self.name)


@lru_cache(maxsize=16)
def compiled(kernel: PrimFunc, isa: InstructionSet | None = None) -> Any:
    """By identity: the same object called again is not compiled again."""
    return tvm.compile(tvm.IRModule({"main": named(kernel, "main")}), target=host_target(isa))


def run(kernel: PrimFunc, *arguments: Tensor) -> list[Tensor]:
    """Returns every argument as it is afterwards. bfloat16 tensors are lent to the kernel, not copied."""
    library = compiled(kernel)
    tensors: list[Any] = [
        tvm.runtime.from_dlpack(a) if a.dtype == torch.bfloat16 else tvm.runtime.tensor(a.numpy()) for a in arguments
    ]
    library["main"](*tensors)
    return [
        a if a.dtype == torch.bfloat16 else torch.from_numpy(np.array(t.numpy()))
        for a, t in zip(arguments, tensors, strict=True)
    ]
