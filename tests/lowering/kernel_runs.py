"""Compile one kernel and call it."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import tvm
from hypothesis import settings
from torch import Tensor
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.target import host_target

few = settings(max_examples=12, deadline=None, derandomize=True)


@lru_cache(maxsize=4)
def _compiled(kernel: PrimFunc) -> Any:
    """By identity: the same object called again is not compiled again."""
    return tvm.compile(tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")}), target=host_target())


def run(kernel: PrimFunc, *arguments: Tensor) -> list[Tensor]:
    """Returns every argument as it is afterwards. bfloat16 tensors are lent to the kernel, not copied."""
    library = _compiled(kernel)
    tensors: list[Any] = [
        tvm.runtime.from_dlpack(a) if a.dtype == torch.bfloat16 else tvm.runtime.tensor(a.numpy()) for a in arguments
    ]
    library["main"](*tensors)
    return [
        a if a.dtype == torch.bfloat16 else torch.from_numpy(np.array(t.numpy()))
        for a, t in zip(arguments, tensors, strict=True)
    ]
