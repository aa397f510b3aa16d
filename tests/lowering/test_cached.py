"""int8 rows of a cache: written bit for bit as PyTorch writes them, on every instruction set of this CPU."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet, cpu_flags, runnable
from fastcar_compile.codegen.tvm.kernels.cache import cache_write, ring_write
from fastcar_compile.codegen.tvm.kernels.tas import tas
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.ops.operator import BLOCK, INT8_MAX, LEAST_EXPONENT, head_dim, loaded, row_size, stored

from .kernel_runs import few, run

COUNT = 512
HERE = runnable(INSTRUCTION_SETS, platform.machine(), cpu_flags())
fastcar = torch.ops.fastcar


def many_rows(count: int, dim: int) -> Tensor:
    """Magnitudes of every power of two, values just below and at where an exponent grows, zeros and infinities."""
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(count, dim, generator=generator)
    rows = torch.ldexp(rows, torch.randint(-149, 127, (count, 1), generator=generator))
    rows[1::8, -1] = torch.exp2(torch.arange(len(rows[1::8])) % 240 - 120.0) * 127.5
    rows[2::8, -1] = torch.nextafter(rows[1::8, -1], torch.tensor(0.0))
    rows[1::8, :-1] = rows[2::8, :-1] = 0
    rows[3::8, 0] = torch.inf
    rows[4::8] = 0
    rows[5::8, dim // 2] = torch.nan
    return rows


def exact(rows: Tensor) -> Tensor:
    """What int8 rows hold, without bits: float64 and the logarithm of the largest magnitude of every block."""
    parts = []
    for part in rows.double().clamp(-INT8_MAX, INT8_MAX).split(BLOCK, -1):
        top = part.abs().amax(-1, keepdim=True)
        least = torch.ceil(torch.log2(top / 127.5))
        least += (torch.exp2(least) * 127.5 <= top).double()
        scale = torch.exp2(least.clamp(min=LEAST_EXPONENT))
        parts.append(torch.where(top.isnan(), torch.nan, torch.round(part / scale) * scale))
    return torch.cat(parts, -1)


@pytest.mark.parametrize("dim", [1, 20, 64, 80])
def test_the_reference_is_what_the_docs_say(dim: int) -> None:
    rows = many_rows(512, dim)
    kept = stored(rows, torch.int8)
    assert kept.shape == (512, row_size(dim, torch.int8))
    assert kept.dtype == torch.int8
    assert kept[:, :dim].min() >= -127
    torch.testing.assert_close(loaded(kept, dim).double(), exact(rows), rtol=0, atol=0, equal_nan=True)
    again = stored(loaded(kept, dim), torch.int8)
    torch.testing.assert_close(loaded(again, dim), loaded(kept, dim), rtol=0, atol=0, equal_nan=True)


def test_what_a_row_keeps() -> None:
    values = torch.tensor([[127.4, 1.0, -1.5, 2.5], [127.5, 1.0, 3.0, -5.0]])
    assert stored(values, torch.int8).tolist() == [[127, 1, -2, 2, 0], [64, 0, 2, -2, 1]]
    assert stored(torch.tensor([1.0, -0.4]), torch.int8).tolist() == [64, -26, -6]
    odd = torch.tensor([[torch.inf, 1.0], [-torch.inf, 1e38], [torch.nan, 1.0], [0.0, -0.0], [2.0**-140, 0.0]])
    small = [0, 0, LEAST_EXPONENT]
    assert stored(odd, torch.int8).tolist() == [[127, 0, 121], [-127, 38, 121], [0, 0, -128], small, small]
    assert loaded(stored(odd, torch.int8), 2)[2].isnan().all()


@given(st.integers(1, 300))
def test_the_size_of_a_row(dim: int) -> None:
    assert row_size(dim, torch.int8) == dim + (dim + 31) // 32
    assert head_dim(row_size(dim, torch.int8), torch.int8) == dim
    assert row_size(dim, "float16") == head_dim(dim, torch.float32) == dim


@dataclass(frozen=True)
class CachedCase:
    """A kernel and its arguments, the output last and as the reference gives it."""

    name: str
    make: Callable[[InstructionSet], PrimFunc]
    arguments: Callable[[], list[np.ndarray]]

    def kernel(self, isa: InstructionSet) -> PrimFunc:
        """For an instruction set, under the case's name."""
        kernel = self.make(isa).with_attr("global_symbol", self.name)
        assert isinstance(kernel, PrimFunc)
        return kernel


def _writing(dim: int) -> CachedCase:
    def make(isa: InstructionSet) -> PrimFunc:
        """The cache as the last argument."""
        kernel = cast("Any", cache_write((1, 1, COUNT, dim), COUNT, "int8", isa))  # tvm declares its fields in C++
        cache, *others = kernel.params
        return PrimFunc([*others, cache], kernel.body, kernel.ret_type, kernel.attrs)

    def arguments() -> list[np.ndarray]:
        rows = many_rows(COUNT, dim)[None, None]
        return [rows.numpy(), np.zeros(1, np.int64), stored(rows, torch.int8).numpy()]

    return CachedCase(f"float32_to_int8_rows_of_{dim}", make, arguments)


def _scoring(dim: int) -> CachedCase:
    """Every row is the key of a batch row; those whose products are too large, or NaN, among them."""
    query, keys = (COUNT, 2, 1, dim), (COUNT, 1, 1, dim)

    def arguments() -> list[np.ndarray]:
        generator = torch.Generator().manual_seed(0)
        cache = stored(many_rows(COUNT, dim)[:, None, None], torch.int8)
        tensors = (torch.randn(query, generator=generator), cache, torch.tensor([0]))
        return [t.numpy() for t in (*tensors, fastcar.tas(*tensors, 3, 0.25))]

    return CachedCase(f"score_of_int8_keys_of_{dim}", lambda isa: tas(query, keys, 3, 0.25, "int8", isa), arguments)


CASES = (*map(_writing, (6, 20, 64, 80)), *map(_scoring, (20, 64)))


@pytest.mark.parametrize("isa", HERE, ids=lambda isa: isa.name)
def test_kernels_are_exact(isa: InstructionSet) -> None:
    library = tvm.compile(tvm.IRModule({case.name: case.kernel(isa) for case in CASES}), target=host_target(isa))
    for case in CASES:
        *inputs, expected = case.arguments()
        result = tvm.runtime.tensor(np.full_like(expected, -1))
        library[case.name](*map(tvm.runtime.tensor, inputs), result)
        assert np.array_equal(result.numpy(), expected), case.name


@few
@given(st.integers(0, 9), st.integers(1, 4), st.sampled_from([1, 6, 33, 48, 128]), st.integers(0, 99))
def test_appended_rows(position: int, rows: int, dim: int, seed: int) -> None:
    """Into a full cache and into a ring; rows beyond the end of the first are dropped."""
    torch.manual_seed(seed)
    cache, value = stored(torch.randn(2, 3, 7, dim), torch.int8), torch.randn(2, 3, rows, dim)
    at = torch.tensor([position])
    written = run(cache_write((2, 3, 7, dim), rows, "int8"), cache, value, at)[0]
    assert torch.equal(written, fastcar.cache_write(cache, value, at))
    written = run(ring_write((2, 3, 7, dim), rows, 2, "int8"), cache, value, at)[0]
    assert torch.equal(written, fastcar.ring_write(cache, value, at, 2))


def test_a_key_with_a_nan_never_lets_its_row_replay() -> None:
    key = torch.ones(1, 1, 1, 64)
    key[..., 40] = torch.nan
    query, at = torch.ones(1, 1, 1, 64), torch.tensor([0])
    score = fastcar.tas(query, stored(key, torch.int8), at, 3, 1.0)
    assert score == 32 - 32 * 2.0**22
    kernel = tas((1, 1, 1, 64), (1, 1, 1, 64), 3, 1.0, "int8")
    assert torch.equal(run(kernel, query, stored(key, torch.int8), at, torch.zeros(1))[-1], score)
