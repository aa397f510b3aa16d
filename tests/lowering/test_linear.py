"""Products with weights of 32 and 16 bits against PyTorch, for this machine and with portable kernels."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.kernels.linear.tiles import PARALLEL_WEIGHTS, SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.registry import LINEARS

from .kernel_runs import few, run

KINDS = {dtype: f"linear_{str(dtype)[6:]}" for dtype in (torch.float32, torch.bfloat16, torch.float16)}
KERNELS = {dtype: LINEARS[name].kernel for dtype, name in KINDS.items()}
DTYPES = st.sampled_from(sorted(KERNELS, key=str))
ARM_TILES = replace(PORTABLE, triple="aarch64-linux-gnu")
"""The tiles of 32 registers of four lanes, which any machine computes."""

SETS = st.sampled_from([PORTABLE, ARM_TILES, host_instruction_set()])


def _check(m: int, n: int, k: int, dtype: torch.dtype, isa: InstructionSet) -> None:
    x, w = torch.randn(m, k), torch.randn(n, k).to(dtype)
    y = run(KERNELS[dtype](m, n, k, isa=isa), x, w, torch.full((m, n), torch.nan))[-1]
    torch.testing.assert_close(y.double(), x.double() @ w.double().T, atol=2e-6 * k, rtol=1e-5)


@few
@given(
    st.one_of(st.integers(1, SMALL_BATCH), st.integers(SMALL_BATCH + 1, 140)),
    st.integers(1, 70),
    st.integers(1, 150),
    DTYPES,
    SETS,
    st.integers(0, 99),
)
def test_linear(m: int, n: int, k: int, dtype: torch.dtype, isa: InstructionSet, seed: int) -> None:
    """Of a few rows and of a chunk."""
    torch.manual_seed(seed)
    _check(m, n, k, dtype, isa)


@pytest.mark.parametrize("dtype", sorted(KERNELS, key=str), ids=str)
@pytest.mark.parametrize("shape", [(2, 481, 640), (8, 205, 1301), (67, 205, 1301)], ids=str)
def test_linear_in_parallel(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """67 rows take panels, and three blocks of the reduction."""
    torch.manual_seed(0)
    assert PARALLEL_WEIGHTS <= 205 * 1301
    _check(*shape, dtype, host_instruction_set())


@few
@given(
    st.lists(st.booleans(), min_size=2, max_size=40),
    st.integers(1, 40),
    st.integers(1, 90),
    DTYPES,
    SETS,
    st.integers(0, 99),
)
def test_zero_rows_are_not_multiplied(
    active: list[bool], n: int, k: int, dtype: torch.dtype, isa: InstructionSet, seed: int
) -> None:
    """Weights that are no numbers show it: a product with one would be one. The other rows keep their bits."""
    torch.manual_seed(seed)
    m, kept = len(active), torch.tensor(active)
    x, w = torch.randn(m, k), torch.randn(n, k).to(dtype)
    kernel = KERNELS[dtype](m, n, k, isa=isa)
    full = run(kernel, x, w, torch.full((m, n), torch.nan))[-1]
    x[~kept] = torch.where(torch.rand(int((~kept).sum()), k) < 0.5, 0.0, -0.0)
    y = run(kernel, x, w, torch.full((m, n), torch.nan))[-1]
    assert torch.equal(y[kept], full[kept])
    assert torch.equal(y[~kept], torch.zeros(int((~kept).sum()), n))
    y = run(kernel, x, torch.full_like(w, torch.nan), torch.ones(m, n))[-1]
    assert y[kept].isnan().all()
    assert torch.equal(y[~kept], torch.zeros(int((~kept).sum()), n))


@pytest.mark.parametrize("isa", [PORTABLE, host_instruction_set()], ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_kind_of_number_is_widened(dtype: torch.dtype, isa: InstructionSet) -> None:
    """Denormals and infinity too: the bits move, nothing is rounded."""
    w = torch.tensor([0.0, -0.0, 1e-40, 6e-8, -1.5, 65504.0, 3e38, float("inf")]).to(dtype)[:, None]
    y = run(KERNELS[dtype](1, len(w), 1, isa=isa), torch.ones(1, 1), w, torch.zeros(1, len(w)))[-1]
    assert torch.equal(y, w.float().T)
