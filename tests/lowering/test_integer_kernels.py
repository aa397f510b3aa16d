"""w8a8 and w4a8 kernels, and those that round to bfloat16, of every instruction set that this CPU runs, bit for bit."""

# pyright: reportInvalidTypeForm=false, reportMissingModuleSource=false
# TVMScript annotates buffers with calls.

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import tvm
from conftest import first_often
from hypothesis import given
from hypothesis import strategies as st
from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet, host_instruction_set, instruction_set
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear.dots import DOTS
from fastcar_compile.codegen.tvm.kernels.vectors import load_from, vector
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.ops.linear import pack_int4

from .integer_cases import CASES, KINDS, QUICK, ROUNDED, TOGETHER, IntegerCase, RoundedCase, TogetherCase, module
from .kernel_runs import HERE, few, named, needs

EVEX = replace(instruction_set("avx512-vnni"), name="vpdpbusd on 256 bits", int8="vnni256")
"""The kernels of avx2-vnni, in the encoding of AVX-512."""
X86 = (*(isa for isa in INSTRUCTION_SETS if isa.machine == "x86_64"), EVEX)


def check(
    library: tvm.runtime.Executable,
    case: IntegerCase | TogetherCase | RoundedCase,
    seed: int = 0,
    skipped: tuple[int, ...] = (),
) -> None:
    """The kernel's outputs equal the reference's; rows that are skipped are zero."""
    arguments, results = case.arguments(seed), getattr(case, "results", 1)
    inputs, outputs = arguments[:-results], arguments[-results:]
    inputs[0][list(skipped)] = 0
    found = [tvm.runtime.tensor(np.full_like(y, np.nan)) for y in outputs]
    library[case.name](*map(tvm.runtime.tensor, inputs), *found)
    for y, expected in zip(found, outputs, strict=True):
        expected[list(skipped)] = 0
        np.testing.assert_array_equal(y.numpy(), expected, err_msg=case.name)


@pytest.mark.parametrize(
    ("isa", "cases"),
    [(HERE[0], (*QUICK, *TOGETHER)), *(pytest.param(i, (*CASES, *TOGETHER), marks=pytest.mark.thorough) for i in X86)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_kernels_are_exact(isa: InstructionSet, cases: Sequence[IntegerCase | TogetherCase]) -> None:
    """With any number of active rows: what does not fill a tile has code of its own."""
    needs(isa)
    library = tvm.compile(module(isa, cases), target=host_target(isa))
    for case in cases:
        check(library, case)
        check(library, case, skipped=tuple(range(0, case.m, 3)))
        for count in {*range(1, min(case.m, 12) + 1), case.m - 2}:
            check(library, case, skipped=tuple(range(count)))


@pytest.mark.parametrize("isa", X86, ids=lambda isa: isa.name)
@pytest.mark.parametrize("kind", DOTS)
def test_a_step_adds_its_products(kind: Literal["int8", "int4"], isa: InstructionSet) -> None:
    """What every entry of the table means, at the largest values of both signs first: nothing saturates."""
    needs(isa)
    dot, four = DOTS[kind][isa.int8], kind == "int4"
    rng = np.random.default_rng(0)
    w = rng.integers(-8 if four else -128, 8 if four else 128, (3, dot.width))
    q = rng.integers(-127, 128, (3, dot.width)).astype(np.int8)
    w[:2], q[0], q[1] = w.min(), 127, -127
    stored = pack_int4(torch.from_numpy(w).to(torch.int8)).numpy() if four else w.astype(np.int8)
    shape, dtype = stored.shape, str(stored.dtype)

    @script.prim_func(private=True, s_tir=True)
    def steps(w: T.Buffer(shape, dtype), q: T.Buffer((3, dot.width), "int8"), y: T.Buffer((3, dot.lanes), "int32")):
        for i in range(3):
            with T.sblock("step"):
                script.access([w, q], [y])
                y[i, vector(0, dot.lanes)] = dot.step(
                    T.Broadcast(i - 7, dot.lanes), load_from(w, [i], 0), load_from(q, [i], 0)
                )

    y = tvm.runtime.tensor(np.zeros((3, dot.lanes), np.int32))
    library = tvm.compile(tvm.IRModule({"main": named(steps, "main")}), target=host_target(isa))
    library["main"](tvm.runtime.tensor(stored), tvm.runtime.tensor(q), y)
    offset = (8 if four else 128) if dot.unsigned else 0
    expected = ((w + offset) * q.astype(int)).sum(1) + dot.lanes * (np.arange(3) - 7)
    np.testing.assert_array_equal(y.numpy().sum(1), expected)


@pytest.mark.parametrize("isa", first_often(isa for isa in X86 if isa.bfloat16), ids=lambda isa: isa.name)
def test_rows_are_rounded_to_bfloat16(isa: InstructionSet) -> None:
    needs(isa)
    library = tvm.compile(module(isa, ROUNDED), target=host_target(isa))
    for case in ROUNDED:
        check(library, case)
        check(library, case, skipped=tuple(range(0, case.m, 3)))
        check(library, case, skipped=tuple(range(case.m)))


@few
@given(
    st.sampled_from(KINDS),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 400),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_shape_is_exact(kind: str, m: int, n: int, k: int, best: bool, seed: int) -> None:
    """With the best kernels of this machine, and with those for every CPU."""
    isa = host_instruction_set()
    case = IntegerCase(kind, m, n, k)
    kernels = isa if best else replace(isa, int8="portable")
    check(tvm.compile(module(kernels, (case,)), target=host_target(isa)), case, seed)


@pytest.mark.parametrize(("m", "k"), first_often([(8, 1152), (1, 1024), (40, 1152)]))
@pytest.mark.parametrize("kind", KINDS)
def test_parallel_blocks_are_exact(kind: str, m: int, k: int) -> None:
    """Threads share nothing but the activations; the last rows of an odd n follow."""
    case = IntegerCase(kind, m, 521, k)
    check(tvm.compile(module(host_instruction_set(), (case,)), target=host_target()), case)


def status_of(kind: str, value: int) -> int:
    """How a child process ends that calls the kernel with rows of `value` and with weights that it cannot read."""
    case = IntegerCase(kind, 2, 32, 256)
    library = tvm.compile(module(host_instruction_set(), (case,)), target=host_target())
    q, s, w, ws, y = case.arguments()
    memory = mmap.mmap(-1, w.nbytes)
    weights = np.frombuffer(memory, w.dtype).reshape(w.shape)
    weights[:] = w
    q[:] = value
    arguments = [tvm.runtime.from_dlpack(weights) if a is w else tvm.runtime.tensor(a) for a in (q, s, w, ws, y)]
    if not (child := os.fork()):
        code = 1
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(weights.ctypes.data), ctypes.c_size_t(w.nbytes), 0)
            library[case.name](*arguments)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_are_not_multiplied(kind: str) -> None:
    """Nothing of the weights is read for them."""
    assert [status_of(kind, value) for value in (0, 1)] == [0, signal.SIGSEGV]
