"""The ring's operators against full caches and a mask; the kernels and ONNX definitions against the operators."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering.kernel_runs import name_of, run
from onnx_export.test_ops import at
from torch import Tensor

from fastcar_compile.codegen.onnx.segments import quiet_exporter
from fastcar_compile.codegen.onnx.translate import translate
from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.kernels.attention import decode as kernels
from fastcar_compile.codegen.tvm.kernels.attention.exact_rows import exact_rows_attention
from fastcar_compile.codegen.tvm.kernels.attention.rows import rows_attention
from fastcar_compile.ir.exact import EXP_TABLE
from fastcar_compile.ir.ops.attention import row_of
from fastcar_compile.ir.ops.operator import loaded, stored

from .oracle import seen

fastcar = torch.ops.fastcar
LENGTH, DIM = 40, 4


def masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention over full caches."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


def filled(ring: int, sinks: int, position: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """A ring cache into which positions 0 .. position + count - 1 were written one by one, all keys, and a query."""
    keys = torch.randn(2, 2, position + count, DIM)
    cache = torch.zeros(2, 2, sinks + ring, DIM)
    for p in range(position + count):
        cache = fastcar.ring_write(cache, keys[:, :, p : p + 1], at(p), sinks)
    return cache, keys, torch.randn(2, 4, count, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("position", [3, 9, 20, 33])
def test_rows_of_a_video_see_a_window_up_to_their_own_position(position: int, dtype: torch.dtype) -> None:
    """All have written before they read, also those behind; one is not there. In a ring that turns between them."""
    window, ring, end, size = 7, 11, position + 4, 32
    keys, query = torch.randn(1, 2, end, size), torch.randn(4, 4, 1, size)
    held, places = stored(keys, dtype), torch.tensor([position, position + 1, position + 2, -1])
    cache = torch.zeros(1, 2, ring, held.shape[3], dtype=dtype)
    for p in range(end):
        cache[:, :, p % ring] = held[:, :, p]
    columns, whole = torch.arange(end), loaded(held, size).expand(3, -1, -1, -1)
    mask = (columns <= places[:3, None]) & (columns > places[:3, None] - window)
    expected = masked(query[:3], whole, whole, mask[:, None, None], 0.3)
    shapes, operands = ((4, 4, 1, size), (1, 2, ring, size), 0.3), [query, cache, cache, places]
    if dtype is torch.int8:
        eager = fastcar.exact_window_attention(*operands, 0.3, 0, window)
        kernel = exact_rows_attention(*shapes, window)
        operands.append(torch.from_numpy(EXP_TABLE.astype(np.int32)))
    else:
        eager = fastcar.window_attention(*operands, 0.3, 0, window)
        kernel = rows_attention(*shapes, "float32", None, window)
    made = run(kernel, *operands, torch.full(query.shape, torch.nan))[-1]
    tolerance = 2e-3 if dtype is torch.int8 else 1e-5
    torch.testing.assert_close(eager, torch.cat([expected, torch.zeros(1, 4, 1, size)]), atol=tolerance, rtol=0)
    torch.testing.assert_close(made, eager, atol=0 if dtype is torch.int8 else 1e-5, rtol=0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sinks=st.integers(0, 7),
    window=st.integers(1, 12),
    stride=st.integers(1, 20),
    chunks=st.lists(st.integers(1, 9), min_size=6, max_size=12),
    pad=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_ring_is_the_full_cache_with_a_mask(
    sinks: int, window: int, stride: int, chunks: list[int], pad: bool, seed: int
) -> None:
    """Any chunks, longer than the window too, padded with garbage or not; and the key of `stride` ago is there."""
    torch.manual_seed(seed)
    widest = max(chunks)
    ring = max(window, stride + 1) + widest - 1
    query, keys, values = torch.randn(1, 4, LENGTH, DIM), torch.randn(1, 2, LENGTH, DIM), torch.randn(1, 2, LENGTH, DIM)
    expected = masked(query, keys, values, seen(LENGTH, sinks, window), 0.3)
    caches, start = [torch.full((1, 2, sinks + ring, DIM), 99.0)] * 2, 0
    for count in chunks:
        count = min(count, LENGTH - start)
        if count == 0:
            break
        here, padding = slice(start, start + count), (0, 0, 0, widest - count if pad else 0)
        new = [torch.nn.functional.pad(t[:, :, here], padding, value=-7.0) for t in (keys, values)]
        caches = [fastcar.ring_write(c, n, at(start), sinks) for c, n in zip(caches, new, strict=True)]
        asked = torch.nn.functional.pad(query[:, :, here], padding)
        actual = fastcar.window_attention(asked, *caches, at(start), 0.3, sinks, window)[:, :, :count]
        torch.testing.assert_close(actual, expected[:, :, here], atol=1e-5, rtol=0)
        for p in range(start, start + count):
            row = fastcar.ring_row(at(p), stride, sinks, ring)
            assert torch.equal(caches[0][:, :, int(row)], keys[:, :, max(p - stride, 0)])
        start += count


@given(sinks=st.integers(0, 9), ring=st.integers(1, 20), start=st.integers(0, 10**9))
def test_rows_of_one_turn_are_distinct_and_follow_each_other(sinks: int, ring: int, start: int) -> None:
    rows = row_of(torch.arange(start + sinks, start + sinks + ring), sinks, ring)
    assert sorted(rows.tolist()) == list(range(sinks, sinks + ring))
    assert torch.equal(row_of(torch.arange(sinks), sinks, ring), torch.arange(sinks))


def test_the_sinks_meet_their_own_query() -> None:
    """With keys of the sinks and the window apart, both parts of the logits can be told from each other."""
    torch.manual_seed(0)
    sinks, window, ring, position = 3, 4, 6, 17
    cache, keys, query = filled(ring, sinks, position, 1)
    other = torch.randn_like(query)
    actual = fastcar.window_attention(query, cache, cache, at(position), 0.5, sinks, window, other)
    first, last = keys[:, :, :sinks], keys[:, :, position - window + 1 :]
    both = torch.cat([first, last], 2).repeat_interleave(2, 1)
    logits = torch.cat([other @ first.repeat_interleave(2, 1).mT, query @ last.repeat_interleave(2, 1).mT], -1)
    torch.testing.assert_close(actual, (logits * 0.5).softmax(-1) @ both)
    assert not torch.allclose(actual, fastcar.window_attention(query, cache, cache, at(position), 0.5, sinks, window))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    sinks=st.integers(0, 5),
    window=st.integers(1, 9),
    spare=st.integers(0, 5),
    count=st.integers(1, 4),
    dim=st.sampled_from([1, 3, 8, 16, 48, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]),
    cap=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
def test_kernel_of_attention(
    sinks: int, window: int, spare: int, count: int, dim: int, dtype: torch.dtype, cap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    ring = window + count - 1 + spare
    caches = stored(torch.randn(2, 2, 2, sinks + ring, dim), dtype)
    query, other = torch.randn(2, 2, 4, count, dim)
    shapes = ((2, 4, count, dim), (2, 2, sinks + ring, dim))
    name = name_of(dtype)
    kernel = kernels.window_attention(*shapes, 0.4, sinks, window, name, cap, isa=host_instruction_set())
    for position in (0, 1, sinks, sinks + window, 3 * ring + 1):
        expected = fastcar.window_attention(query, *caches, at(position), 0.4, sinks, window, other, cap)
        actual = run(kernel, query, *caches, at(position), other, torch.zeros_like(query))[-1]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("isa", [PORTABLE, host_instruction_set()], ids=lambda isa: isa.name)
def test_a_window_in_pieces(isa: InstructionSet) -> None:
    """Few heads over a long window: pieces of it in parallel, some of them empty; the ring wraps inside of one."""
    torch.manual_seed(0)
    hq, hkv, sinks, window, dim = 2, 1, 5, 1030, 128
    assert kernels.context_parts(hkv, 2 * hkv * (sinks + window) * dim) > 1
    shape = (1, hkv, sinks + window + 3, dim)
    caches = stored(torch.randn(2, *shape), torch.int8)
    query, other = torch.randn(2, 1, hq, 1, dim)
    kernel = kernels.window_attention((1, hq, 1, dim), shape, 0.1, sinks, window, "int8", isa=isa)
    for position in (0, sinks, 40, window, 3000):
        expected = fastcar.window_attention(query, *caches, at(position), 0.1, sinks, window, other)
        actual = run(kernel, query, *caches, at(position), other, torch.zeros_like(query))[-1]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_window_does_not_hide_a_nan() -> None:
    caches = torch.zeros(2, 1, 1, 12, 8)
    caches[1, 0, 0, 1, 3] = torch.nan  # a sink
    query = torch.ones(1, 1, 1, 8)
    kernel = kernels.window_attention((1, 1, 1, 8), (1, 1, 12, 8), 1.0, 4, 8)
    for position in (2, 20):
        actual = run(kernel, query, *caches, at(position), query, torch.zeros_like(query))[-1]
        assert actual.isnan().flatten().tolist() == [c == 3 for c in range(8)]


def test_the_row_of_an_earlier_key() -> None:
    kernel = kernels.ring_row(4, 3, 6)
    for position in (0, 2, 3, 11, 30):
        assert torch.equal(run(kernel, at(position), at(0))[1], fastcar.ring_row(at(position), 4, 3, 6))


@pytest.mark.parametrize("sinks", [0, 3])
def test_onnx(tmp_path: Path, sinks: int) -> None:
    """All definitions in one model; the position is an input of it."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 2, sinks + 7, DIM)
    query, other = torch.randn(2, 2, 4, 1, DIM)
    new = torch.randn(2, 2, 1, DIM)

    class Model(torch.nn.Module):
        def forward(self, position: Tensor) -> tuple[Tensor, ...]:
            cache = fastcar.ring_write(keys, new, position, sinks)
            arguments = (query, cache, values, position, 0.4, sinks, 5)
            row, most = fastcar.ring_row(position, 4, sinks, 7), fastcar.limit(position, 6)
            attended = [fastcar.window_attention(*arguments, *more) for more in ((), (other,), (other, 0.7))]
            return cache, row, most, *attended

    path = tmp_path / "ops.onnx"
    with quiet_exporter():
        exported = torch.export.export(Model(), (at(0),), strict=False)
        onnx.save(translate(exported), path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for position in (0, 1, 3, 4, 20):
        actual = session.run(None, {session.get_inputs()[0].name: np.array([position])})
        for name, a, e in zip(
            ["cache", "row", "limit", "full", "sink", "cap"], actual, Model()(at(position)), strict=True
        ):
            assert torch.allclose(torch.from_numpy(a), e, atol=1e-6), (name, position)
