"""float16 of a cache against PyTorch, for every value and every instruction set of this CPU."""

# pyright: reportInvalidTypeForm=false, reportMissingModuleSource=false
# TVMScript annotates buffers with calls; tvm.script.tirx is made when tvm is imported.

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from torch import Tensor
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet, cpu_flags, runnable
from fastcar_compile.codegen.tvm.kernels.cache import cache_write
from fastcar_compile.codegen.tvm.kernels.vectors import from_float32, to_float32
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.ops.operator import stored

COUNT, LANES = 1 << 16, 16
HERE = runnable(INSTRUCTION_SETS, platform.machine(), cpu_flags())
CALLS = re.compile(r"\b(?:callq?|jmp|bl|b)\s+(__\w*(?:hf|gnu_[fh]2[fh])\w*)")
HARDWARE = {"x86_64": ("vcvtph2ps", "vcvtps2ph"), "aarch64": ("fcvtl", "fcvtn")}


def _widening(isa: InstructionSet) -> PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def widen(half: T.Buffer((COUNT,), "float16"), wide: T.Buffer((COUNT,), "float32")):
        for i in range(COUNT // LANES):
            with T.sblock("values"):
                for v in T.vectorized(LANES):
                    wide[i * LANES + v] = to_float32(half[i * LANES + v], "float16", isa)

    return widen


def _narrowing(isa: InstructionSet) -> PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def narrow(full: T.Buffer((COUNT,), "float32"), half: T.Buffer((COUNT,), "float16")):
        for i in range(COUNT // LANES):
            with T.sblock("values"):
                for v in T.vectorized(LANES):
                    half[i * LANES + v] = from_float32(full[i * LANES + v], "float16", isa)

    return narrow


def every_half() -> Tensor:
    """Subnormals, infinities and NaN are among them."""
    return torch.arange(COUNT, dtype=torch.int32).to(torch.int16).view(torch.float16)


def many_floats() -> Tensor:
    """Any bits, every float16, every tie between two neighbours, and what lies just above it."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(-(2**31), 2**31 - 1, (COUNT,), dtype=torch.int32, generator=generator).view(torch.float32)
    half = every_half().float()
    full[::4] = half[::4]
    full[1::4] = (half[1::4] + half[2::4]) / 2
    full[2::4] = torch.nextafter(full[1::4], torch.tensor(torch.inf))
    return full


@dataclass(frozen=True)
class HalfCase:
    """One direction; what a NaN carries is not compared, so there is none."""

    name: str
    make: Callable[[InstructionSet], PrimFunc]

    def arguments(self) -> list[np.ndarray]:
        """Of the kernel, the output last and as the reference gives it."""
        values = every_half() if self.make is _widening else many_floats()
        values = torch.where(values.isnan(), 1, values)
        result = values.float() if self.make is _widening else stored(values, torch.float16)
        return [values.numpy(), result.numpy()]

    def kernel(self, isa: InstructionSet) -> PrimFunc:
        """For an instruction set, under the case's name."""
        kernel = self.make(isa).with_attr("global_symbol", self.name)
        assert isinstance(kernel, PrimFunc)
        return kernel


CASES = (HalfCase("float16_to_float32", _widening), HalfCase("float32_to_float16", _narrowing))


def _compiled(kernel: PrimFunc, isa: InstructionSet) -> Any:
    return tvm.compile(tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")}), target=host_target(isa))


def _assert_same(actual: Any, expected: Tensor) -> None:
    """Bit for bit, but for what a NaN carries."""
    found = torch.from_numpy(np.array(actual.numpy()))
    assert found.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    bits = torch.int16 if expected.dtype == torch.float16 else torch.int32
    assert torch.equal(found.view(bits)[~nan], expected.view(bits)[~nan])


@pytest.mark.parametrize("isa", HERE, ids=lambda isa: isa.name)
def test_every_float16_and_many_float32(isa: InstructionSet) -> None:
    half, full = every_half(), many_floats()
    wide, narrow = tvm.runtime.tensor(np.zeros(COUNT, np.float32)), tvm.runtime.tensor(np.zeros(COUNT, np.float16))
    _compiled(_widening(isa), isa)["main"](tvm.runtime.tensor(half.numpy()), wide)
    _compiled(_narrowing(isa), isa)["main"](tvm.runtime.tensor(full.numpy()), narrow)
    _assert_same(wide, half.float())
    _assert_same(narrow, stored(full, torch.float16))


def test_a_cache_keeps_what_it_can() -> None:
    values = torch.tensor([65504.0, 65519.0, 65536.0, torch.inf, -torch.inf, torch.nan, 2.0**-25, 2.0**-24])
    expected = torch.tensor([65504.0, 65504.0, 65504.0, 65504.0, -65504.0, torch.nan, 0.0, 2.0**-24])
    torch.testing.assert_close(stored(values, torch.float16).float(), expected, rtol=0, atol=0, equal_nan=True)
    assert stored(values, torch.float32) is values


@pytest.mark.parametrize("isa", INSTRUCTION_SETS, ids=lambda isa: isa.name)
def test_no_element_is_converted_by_a_call(isa: InstructionSet) -> None:
    """LLVM calls the compiler's library, once per element, where there is no instruction."""
    library = _compiled(cache_write((1, 2, 8, 64), 1, "float16", isa), isa)
    library = getattr(library, "mod", library)
    text = library.inspect_source("asm")
    assert CALLS.findall(text) == []
    assert any(name in text for name in HARDWARE[isa.machine]) == isa.float16


def test_the_calls_would_be_found() -> None:
    """A conversion by LLVM alone, on the instruction set without one."""

    @T.prim_func(private=True, s_tir=True)
    def convert(half: T.Buffer((4,), "float16"), wide: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("value"):
                wide[i] = T.Cast("float32", half[i])

    sse4 = next(isa for isa in INSTRUCTION_SETS if isa.name == "sse4")
    library = _compiled(convert, sse4)
    assert "__extendhfsf2" in CALLS.findall(getattr(library, "mod", library).inspect_source("asm"))
