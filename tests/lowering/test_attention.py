"""Decode and chunk attention against the eager operator."""

from functools import cache
from itertools import cycle

import pytest
import torch
from conftest import first_often
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from tvm.tirx import PrimFunc

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.codegen.tvm.isa import (
    INSTRUCTION_SETS,
    PORTABLE,
    InstructionSet,
    host_instruction_set,
)
from fastcar_compile.codegen.tvm.kernels.attention.chunk import chunk_attention
from fastcar_compile.codegen.tvm.kernels.attention.context import context_attention
from fastcar_compile.codegen.tvm.kernels.attention.decode import context_parts, decode_attention, window_attention
from fastcar_compile.codegen.tvm.kernels.attention.rows import rows_attention
from fastcar_compile.codegen.tvm.kernels.attention.softmax import KEY_BLOCK
from fastcar_compile.config.formats import KV_TYPES
from fastcar_compile.ir.ops.operator import loaded, stored

from .kernel_runs import HERE, few, name_of, run

Heads = tuple[int, int]
HEADS = st.sampled_from([(4, 4), (4, 2), (6, 1), (5, 5), (3, 1)])
DIMS = st.sampled_from([1, 6, 8, 20, 32, 64, 80, 128])
CAPS = st.sampled_from([None, 0.7])
"""Soft-caps; the logits are about one."""
TYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8])
ISA = host_instruction_set()


def _inputs(
    b: int, heads: Heads, t: int, s: int, d: int, position: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cache rows that are not filled hold NaN: reading one would show."""
    hq, hkv = heads
    q, k, v = torch.randn(b, hq, t, d), torch.randn(b, hkv, s, d), torch.randn(b, hkv, s, d)
    k[:, :, position + t :] = torch.nan
    v[:, :, position + t :] = torch.nan
    return q, stored(k, dtype), stored(v, dtype), torch.tensor([position])


@cache
def _kernel(b: int, heads: Heads, t: int, s: int, d: int, dtype: torch.dtype, cap: float | None = None) -> PrimFunc:
    make = decode_attention if t == 1 else chunk_attention
    return make((b, heads[0], t, d), (b, heads[1], s, d), 0.3, name_of(dtype), cap, isa=ISA)


def _check(
    b: int,
    heads: Heads,
    t: int,
    s: int,
    d: int,
    position: int,
    dtype: torch.dtype = torch.float32,
    cap: float | None = None,
) -> None:
    q, k, v, at = _inputs(b, heads, t, s, d, position, dtype)
    y = run(_kernel(b, heads, t, s, d, dtype, cap), q, k, v, at, torch.full((b, heads[0], t, d), torch.nan))[-1]
    expected = torch.ops.fastcar.attention(q, k, v, at, 0.3, cap)
    seen = min(t, s - position)
    torch.testing.assert_close(y[:, :, :seen], expected[:, :, :seen], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "t", "d", "dv", "cap"), [((4, 2), 1, 20, 20, None), ((6, 1), 3, 32, 6, 0.7), ((8, 8), 9, 128, 128, None)]
)
def test_attention_to_a_context(heads: Heads, t: int, d: int, dv: int, cap: float | None) -> None:
    """Small and large ones: the last runs in parallel. The second row sees one token only."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, heads[0], t, d), torch.randn(2, heads[1], 11, d), torch.randn(2, heads[1], 11, dv)
    mask = torch.zeros(2, 1, 1, 11)
    mask[1, ..., 1:] = torch.finfo(torch.float32).min
    kernel = context_attention((2, heads[0], t, d), (2, heads[1], 11, dv), 2, 0.3, cap)
    y = run(kernel, q, k, v, mask, torch.full((2, heads[0], t, dv), torch.nan))[-1]
    torch.testing.assert_close(y, torch.ops.fastcar.context_attention(q, k, v, 0.3, mask, cap), atol=1e-5, rtol=1e-4)


@few
@given(st.integers(1, 2), HEADS, st.integers(0, 99), DIMS, TYPES, CAPS, st.integers(0, 99))
def test_decode_attention(
    b: int, heads: Heads, position: int, d: int, dtype: torch.dtype, cap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    _check(b, heads, 1, 100, d, position, dtype, cap)


@few
@given(
    st.integers(1, 2),
    HEADS,
    st.sampled_from([(2, 0), (5, 0), (5, 30), (6, 97), (8, 41), (64, 9)]),
    DIMS,
    TYPES,
    CAPS,
    st.integers(0, 99),
)
def test_chunk_attention(
    b: int, heads: Heads, rows: tuple[int, int], d: int, dtype: torch.dtype, cap: float | None, seed: int
) -> None:
    """Chunks that end before, at and beyond the end of the cache."""
    torch.manual_seed(seed)
    _check(b, heads, rows[0], 100, d, rows[1], dtype, cap)


@pytest.mark.parametrize("isa", first_often([*HERE, PORTABLE]), ids=lambda isa: isa.name)
@few
@given(HEADS, st.sampled_from([2, 5]), DIMS, TYPES, CAPS, st.integers(0, 99))
def test_rows_over_one_cache(
    isa: InstructionSet, heads: Heads, rows: int, d: int, dtype: torch.dtype, cap: float | None, seed: int
) -> None:
    """Some rows are not there; positions that no row sees hold NaN. Rows are the same bits when alone."""
    torch.manual_seed(seed)
    (hq, hkv), videos, s = heads, 2, 100
    places = torch.randint(0, s, (videos * rows,))
    places[1] = -1
    seen = torch.arange(s) <= places[:, None]
    q, k, v = torch.randn(videos * rows, hq, 1, d), torch.randn(videos, hkv, s, d), torch.randn(videos, hkv, s, d)
    for held in (k, v):
        held.masked_fill_(~seen.reshape(videos, rows, s).any(1)[:, None, :, None], torch.nan)
    k, v = stored(k, dtype), stored(v, dtype)
    kernel = rows_attention((len(q), hq, 1, d), (videos, hkv, s, d), 0.3, name_of(dtype), cap, None, isa=isa)
    y = run(kernel, q, k, v, places, torch.full(q.shape, torch.nan))[-1]
    there = seen.any(1)
    mine = [i for i in range(len(q)) if there[i]]
    keys, values = (loaded(c, d)[[i // rows for i in mine]].repeat_interleave(hq // hkv, 1) for c in (k, v))
    logits = torch.einsum("bhd,bhsd->bhs", q[mine, :, 0], keys) * 0.3
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)).masked_fill(~seen[mine, None], -torch.inf)
    expected = torch.einsum("bhs,bhsd->bhd", logits.softmax(-1), values.nan_to_num())
    torch.testing.assert_close(y[mine, :, 0], expected, atol=1e-5, rtol=1e-4)
    assert not y[~there].any()
    places[torch.arange(len(q)) % rows != rows - 1] = -1
    alone = run(kernel, q, k, v, places, torch.full(q.shape, torch.nan))[-1]
    assert torch.equal(alone[rows - 1 :: rows], y[rows - 1 :: rows])


@pytest.mark.parametrize(("isa", "dtype"), [*zip(INSTRUCTION_SETS, cycle(KV_TYPES))])
def test_kernels_are_made_on_a_cpu_that_cannot_run_them(isa: InstructionSet, dtype: str) -> None:
    shapes = (2, 4, 1, 64), (2, 2, 48, 64)
    decode, window = (
        decode_attention(*shapes, 0.3, dtype, None, isa=isa),
        window_attention(*shapes, 0.3, 4, 16, dtype, None, isa=isa),
    )
    assert all(isinstance(kernel, PrimFunc) for kernel in (decode, window))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("query", [0.0, 1e-35, 1e30])
@pytest.mark.parametrize("value", [0.0, 1e-35, 1e30])
def test_int8_rows_of_any_magnitude(d: int, query: float, value: float) -> None:
    """Logits are 0, or one is far above the others; values that are too small for a weight's digits vanish."""
    torch.manual_seed(0)
    q, k, v, at = _inputs(1, (2, 2), 1, 70, d, 66)
    q, k, v = q * query, stored(k * min(1.0, 1e4 / max(query, 1.0)), torch.int8), stored(v * value, torch.int8)
    y = run(_kernel(1, (2, 2), 1, 70, d, torch.int8), q, k, v, at, torch.zeros(1, 2, 1, d))[-1]
    expected = torch.ops.fastcar.attention(q, k, v, at, 0.3)
    torch.testing.assert_close(y, expected, atol=max(1e-5 * value, 1e-30), rtol=1e-4)


def test_decode_attention_in_pieces_of_the_context() -> None:
    """Few heads over a long cache: pieces of the context in parallel, some of them empty."""
    torch.manual_seed(0)
    heads = 4, 1
    assert context_parts(1, 2 * 1024 * 128) > 1
    for position in (0, KEY_BLOCK - 1, KEY_BLOCK, 700, 1023):
        _check(1, heads, 1, 1024, 128, position)
        _check(1, heads, 1, 1024, 128, position, torch.float16)
        _check(1, heads, 1, 1024, 128, position, torch.int8)


@pytest.mark.parametrize("heads", [(4, 1), (3, 3)])
def test_chunk_attention_in_parallel(heads: Heads) -> None:
    torch.manual_seed(0)
    _check(1, heads, 8, 1024, 64, 300)


@pytest.mark.parametrize(("heads", "dtype"), [((6, 2), torch.int8), ((3, 1), torch.float32)])
def test_query_heads_in_parallel(heads: Heads, dtype: torch.dtype) -> None:
    """Of a cache too small for pieces of the context: a piece for each query head."""
    torch.manual_seed(0)
    assert "T.parallel(" in _kernel(2, heads, 1, 400, 64, dtype).script()
    _check(2, heads, 1, 400, 64, 300, dtype)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("large", [80.0, 3e4])
def test_attention_of_large_logits(t: int, large: float) -> None:
    """Weights far below the largest one vanish, and nothing overflows."""
    torch.manual_seed(0)
    q, k, v, at = _inputs(1, (2, 2), t, 70, 16, 66)
    make = decode_attention if t == 1 else chunk_attention
    y = run(make((1, 2, t, 16), (1, 2, 70, 16), large), q, k, v, at, torch.zeros(1, 2, t, 16))[-1]
    torch.testing.assert_close(y, torch.ops.fastcar.attention(q, k, v, at, large), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize(("d", "dtype"), [(16, torch.float32), (16, torch.int8), (128, torch.int8)])
def test_attention_does_not_hide_a_nan(t: int, what: str, d: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, t, d), torch.randn(1, 1, 70, d), torch.randn(1, 1, 70, d)
    {"query": q, "key": k, "value": v}[what][0, 0, 0, 3] = torch.nan
    caches = stored(k, dtype), stored(v, dtype)
    y = run(_kernel(1, (4, 1), t, 70, d, dtype), q, *caches, torch.tensor([40]), torch.zeros(1, 4, t, d))[-1]
    assert torch.isnan(y[0, 0, 0]).any()
    assert torch.isnan(y[0, 3, 0]).any() == (what != "query")


@pytest.mark.parametrize("d", [16, 128])
def test_an_infinite_query_is_no_number(d: int) -> None:
    torch.manual_seed(0)
    q, k, v, at = _inputs(1, (1, 1), 1, 70, d, 40, torch.int8)
    q[0, 0, 0, 3] = -torch.inf
    y = run(_kernel(1, (1, 1), 1, 70, d, torch.int8), q, k, v, at, torch.zeros(1, 1, 1, d))[-1]
    assert torch.isnan(y).all()
    assert torch.isnan(torch.ops.fastcar.attention(q, k, v, at, 0.3)).all()
