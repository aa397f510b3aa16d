"""float16, bfloat16 and int8 rows of a cache: bit for bit as PyTorch has them, on every instruction set of this CPU."""

# pyright: reportInvalidTypeForm=false, reportMissingModuleSource=false
# TVMScript annotates buffers with calls; tvm.script.tirx is made when tvm is imported.

import re
from functools import partial
from itertools import product, starmap
from typing import Any, cast

import numpy as np
import pytest
import torch
import tvm
from conftest import first_often
from torch import Tensor
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet
from fastcar_compile.codegen.tvm.kernels.cache import cache_write
from fastcar_compile.codegen.tvm.kernels.tas import tas
from fastcar_compile.codegen.tvm.kernels.vectors import from_float32, to_float32
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.config.formats import DTYPES, kv_type
from fastcar_compile.ir.ops.operator import BLOCK, INT8_MAX, LEAST_EXPONENT, loaded, stored
from fastcar_compile.ir.weights import to_numpy

from .kernel_runs import HERE, KernelCase, compiled

COUNT, HALVES, LANES = 512, 1 << 16, 16
FLOATS = ("float16", "bfloat16")
CALLS = re.compile(r"\b(?:callq?|jmp|bl|b)\s+(__\w*(?:hf|gnu_[fh]2[fh])\w*)")
HARDWARE = {"x86_64": ("vcvtph2ps", "vcvtps2ph"), "aarch64": ("fcvtl", "fcvtn"), "wasm32": ()}
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
    assert kept.shape == (512, kv_type("int8").row_size(dim))
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


def _widening(dtype: str, isa: InstructionSet) -> PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def widen(half: T.Buffer((HALVES,), dtype), wide: T.Buffer((HALVES,), "float32")):
        for i in range(HALVES // LANES):
            with T.sblock("values"):
                for v in T.vectorized(LANES):
                    wide[i * LANES + v] = to_float32(half[i * LANES + v], dtype, isa)

    return widen


def _narrowing(dtype: str, isa: InstructionSet) -> PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def narrow(full: T.Buffer((HALVES,), "float32"), half: T.Buffer((HALVES,), dtype)):
        for i in range(HALVES // LANES):
            with T.sblock("values"):
                for v in T.vectorized(LANES):
                    half[i * LANES + v] = from_float32(full[i * LANES + v], dtype, isa)

    return narrow


def every_half(dtype: str) -> Tensor:
    """Subnormals, infinities and NaN are among them."""
    return torch.arange(HALVES, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))


def many_floats(dtype: str) -> Tensor:
    """Any bits, every value of the dtype, every tie between two neighbours, and what lies just above it."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(-(2**31), 2**31 - 1, (HALVES,), dtype=torch.int32, generator=generator).view(torch.float32)
    half = every_half(dtype).float()
    full[::4] = half[::4]
    full[1::4] = half[1::4] / 2 + half[2::4] / 2
    full[2::4] = torch.nextafter(full[1::4], torch.tensor(torch.inf))
    return full


def _writing(dim: int) -> KernelCase:
    def make(isa: InstructionSet) -> PrimFunc:
        """The cache as the last argument."""
        kernel = cast("Any", cache_write((1, 1, COUNT, dim), COUNT, "int8", isa=isa))  # tvm declares its fields in C++
        cache, *others = kernel.params
        return PrimFunc([*others, cache], kernel.body, kernel.ret_type, kernel.attrs)

    def arguments() -> list[np.ndarray]:
        rows = many_rows(COUNT, dim)[None, None]
        return [rows.numpy(), np.zeros(1, np.int64), stored(rows, torch.int8).numpy()]

    return KernelCase(f"float32_to_int8_rows_of_{dim}", make, arguments)


def _scoring(dim: int) -> KernelCase:
    """Every row is the key of a batch row; those whose products are too large, or NaN, among them."""
    query, keys = (COUNT, 2, 1, dim), (COUNT, 1, 1, dim)

    def arguments() -> list[np.ndarray]:
        generator = torch.Generator().manual_seed(0)
        cache = stored(many_rows(COUNT, dim)[:, None, None], torch.int8)
        tensors = (torch.randn(query, generator=generator), cache, torch.tensor([0]))
        return [t.numpy() for t in (*tensors, fastcar.tas(*tensors, 3, 0.25))]

    return KernelCase(f"score_of_int8_keys_of_{dim}", lambda isa: tas(query, keys, 3, 0.25, "int8", isa=isa), arguments)


def _converting(dtype: str, widen: bool) -> KernelCase:
    """One direction; what a NaN carries is not compared, so there is none."""

    def arguments() -> list[np.ndarray]:
        values = every_half(dtype) if widen else many_floats(dtype)
        values = torch.where(values.isnan(), 1, values)
        return [to_numpy(values), to_numpy(values.float() if widen else stored(values, getattr(torch, dtype)))]

    name = f"{dtype}_to_float32" if widen else f"float32_to_{dtype}"
    return KernelCase(name, partial(_widening if widen else _narrowing, dtype), arguments)


_CONVERSIONS = starmap(_converting, product(FLOATS, (True, False)))
CASES = (*_CONVERSIONS, *map(_writing, (6, 20, 64, 80)), *map(_scoring, (20, 64)))


@pytest.mark.parametrize("isa", first_often(HERE, 2), ids=lambda isa: isa.name)
def test_kernels_are_exact(isa: InstructionSet) -> None:
    library = tvm.compile(tvm.IRModule({case.name: case.kernel(isa) for case in CASES}), target=host_target(isa))
    for case in CASES:
        *inputs, expected = case.arguments()
        result = tvm.runtime.tensor(np.full_like(expected, -1))
        library[case.name](*map(tvm.runtime.tensor, inputs), result)
        assert result.numpy().tobytes() == expected.tobytes(), case.name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("isa", first_often(HERE, 2), ids=lambda isa: isa.name)
def test_a_nan_stays_one(isa: InstructionSet, dtype: str) -> None:
    for make, values in ((_widening, every_half(dtype)), (_narrowing, many_floats(dtype))):
        wide = values.dtype == torch.float32
        result = tvm.runtime.tensor(np.zeros(HALVES, DTYPES[dtype].numpy if wide else np.float32))
        compiled(make(dtype, isa), isa)["main"](tvm.runtime.tensor(to_numpy(values)), result)
        assert np.array_equal(np.isnan(result.numpy()), values.isnan().numpy())


def test_bfloat16_is_what_ml_dtypes_has() -> None:
    """Subnormals, ties and what rounds to infinity are among the values."""
    values, half = many_floats("bfloat16"), every_half("bfloat16")
    values = values[~values.isnan()]
    expected = values.numpy().astype(DTYPES["bfloat16"].numpy)
    assert to_numpy(stored(values, half.dtype)).tobytes() == expected.tobytes()
    assert np.array_equal(kv_type(half.dtype).widened(to_numpy(half), 1), loaded(half, 1).numpy(), equal_nan=True)


def test_a_cache_keeps_what_it_can() -> None:
    values = torch.tensor([65504.0, 65519.0, 65536.0, torch.inf, -torch.inf, torch.nan, 2.0**-25, 2.0**-24])
    expected = torch.tensor([65504.0, 65504.0, 65504.0, 65504.0, -65504.0, torch.nan, 0.0, 2.0**-24])
    torch.testing.assert_close(stored(values, torch.float16).float(), expected, rtol=0, atol=0, equal_nan=True)
    assert stored(values, torch.float32) is values
    values = torch.tensor([3.4e38, -torch.inf, torch.nan, 2.0**-133, 2.0**-134, 257.0, 259.0])
    expected = torch.tensor([torch.inf, -torch.inf, torch.nan, 2.0**-133, 0.0, 256.0, 260.0])
    torch.testing.assert_close(stored(values, torch.bfloat16).float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [*product(INSTRUCTION_SETS, ["float16"]), *product(INSTRUCTION_SETS[::4], ["bfloat16"])],
    ids=lambda value: getattr(value, "name", value),
)
def test_no_element_is_converted_by_a_call(isa: InstructionSet, dtype: str) -> None:
    """LLVM calls the compiler's library, once per element, where there is no instruction."""
    library = compiled(cache_write((1, 2, 8, 64), 1, dtype, isa=isa), isa)
    library = getattr(library, "mod", library)
    text = library.inspect_source("asm")
    assert CALLS.findall(text) == []
    assert any(name in text for name in HARDWARE[isa.machine]) == (isa.float16 and dtype == "float16")
