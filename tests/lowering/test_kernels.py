"""Every kernel against its eager operator; the integer linears in test_integer_kernels.py too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastcar_compile.codegen.tvm.fusion  # noqa: F401  (registers the fused operators)
from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.kernels.cache import (
    cache_write,
    concat_rows,
    ring_write,
    slot_read,
    slot_write,
    slots_write,
    split_rows,
)
from fastcar_compile.codegen.tvm.kernels.gate import GateRules, gate
from fastcar_compile.codegen.tvm.kernels.linear.activations import activation_factor, quantize_rows
from fastcar_compile.codegen.tvm.kernels.tas import tas
from fastcar_compile.config.formats import KV_TYPES
from fastcar_compile.ir.ops.linear import FACTORS, factor_table
from fastcar_compile.ir.ops.operator import stored

from .kernel_runs import few, name_of, run, same_rows

fastcar = torch.ops.fastcar

ISA = host_instruction_set()


@few
@given(st.integers(1, 3), st.integers(1, 200), st.sampled_from([0.0, 1e-35, 1e-3, 1.0, 300.0]), st.integers(0, 99))
def test_quantize_rows_is_exact(m: int, k: int, size: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(m, k) * size
    same_rows(run(quantize_rows(m, k), x, torch.zeros(m, k, dtype=torch.int8), torch.zeros(m)), x)


@few
@given(
    st.sampled_from(sorted(FACTORS)),
    st.integers(1, 3000),
    st.sampled_from([0.1, 4.0, 30.0]),
    st.sampled_from([PORTABLE, ISA]),
    st.integers(0, 99),
)
def test_activation_factor_is_exact(activation: str, size: int, scale: float, isa: InstructionSet, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(size) * scale
    y = run(activation_factor(size, activation, isa), x, factor_table(activation), torch.zeros(size))[-1]
    assert torch.equal(y, fastcar.activation_factor(x, activation))


@few
@given(st.integers(1, 2), st.sampled_from([(4, 4), (4, 2)]), st.integers(0, 36), st.integers(1, 20), st.integers(0, 9))
def test_tas(b: int, heads: tuple[int, int], position: int, stride: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(b, heads[0], 1, 16), torch.randn(b, heads[1], 37, 16)
    at = torch.tensor([position])
    for dtype in KV_TYPES:
        keys = stored(k, getattr(torch, dtype))
        kernel = tas((b, heads[0], 1, 16), (b, heads[1], 37, 16), stride, 0.25, dtype)
        y = run(kernel, q, keys, at, torch.zeros(b))[-1]
        assert torch.equal(y, fastcar.tas(q, keys, at, stride, 0.25))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38, -3e38, 2.0**11, 1e-40, 2.0**-12.5])
def test_tas_of_extreme_values_is_exact(value: float) -> None:
    """Not finite, at the limit of one product, denormal, and near a tie of the rounding."""
    q, k = torch.full((1, 2, 1, 3), value), torch.tensor([0.0, 2.0**11 + 1, 2.0**-12.5]).expand(1, 1, 5, 3).clone()
    at = torch.tensor([4])
    y = run(tas((1, 2, 1, 3), (1, 1, 5, 3), 2, 0.5), q, k, at, torch.zeros(1))[-1]
    assert torch.equal(y, fastcar.tas(q, k, at, 2, 0.5))
    assert torch.isfinite(y).all()


@few
@given(st.integers(1, 3), st.sampled_from([(4, 2), (6, 6), (8, 1)]), st.integers(1, 130), st.integers(0, 99))
def test_tas_is_the_mean_of_the_attention_logits(b: int, heads: tuple[int, int], dim: int, seed: int) -> None:
    """Against a plain sum in float64: off by the rounding of each product, and by that of the result."""
    torch.manual_seed(seed)
    q, k = torch.randn(b, heads[0], 1, dim) * 3, torch.randn(b, heads[1], 9, dim) * 3
    repeated = k[:, :, 5].repeat_interleave(heads[0] // heads[1], 1).double()
    expected = 0.3 * (q[:, :, 0].double() * repeated).sum(-1).mean(1)
    y = fastcar.tas(q, k, torch.tensor([8]), 3, 0.3).double()
    assert ((y - expected).abs() <= 0.3 * dim * 2.0**-25 + expected.abs() * 2.0**-22).all()


@few
@given(st.integers(1, 6), st.integers(0, 30), st.sampled_from([1, 6, 12, 33, 48, 128]), st.integers(0, 9))
def test_appended_rows(rows: int, position: int, dim: int, seed: int) -> None:
    """Into a full cache, which drops rows at or beyond S, and into a ring."""
    torch.manual_seed(seed)
    cache, value, at = torch.randn(2, 3, 9, dim), torch.randn(2, 3, rows, dim), torch.tensor([position])
    for name in KV_TYPES:
        before = stored(cache, getattr(torch, name))
        y = run(cache_write((2, 3, 9, dim), rows, name), before.clone(), value, at)[0]
        assert torch.equal(y, fastcar.cache_write(before, value, at))
        y = run(ring_write((2, 3, 9, dim), rows, 2, name), before.clone(), value, at)[0]
        assert torch.equal(y, fastcar.ring_write(before, value, at, 2))


@few
@given(st.integers(0, 20), st.sampled_from([-1, 1, 2]), st.booleans(), st.integers(0, 99))
def test_gate(step: int, max_chain: int, couple: bool, seed: int) -> None:
    torch.manual_seed(seed)
    score, threshold = torch.randn(4).round(decimals=1), torch.randn(1).round(decimals=1)
    chain, now = torch.randint(0, 3, (5, 4), dtype=torch.int32), torch.tensor([step])
    out = torch.zeros(4, dtype=torch.bool)
    rules = GateRules(6, max_chain, couple)
    y = run(gate(4, 5, rules), chain, score, threshold, now, out)[-1]
    assert torch.equal(y, fastcar.gate(score, threshold, now, chain, 6, max_chain, couple))
    counted, *_, replay = run(gate(4, 5, rules, counts=True), chain, score, threshold, now, out)
    expected = fastcar.gate_and_count(chain, score, threshold, now, 6, max_chain, couple, 0, False)
    assert torch.equal(replay, expected[0])
    assert torch.equal(counted, expected[1])


@few
@given(st.integers(0, 20), st.integers(0, 9))
def test_slots(step: int, seed: int) -> None:
    torch.manual_seed(seed)
    cache, value, now = torch.randn(5, 2, 12), torch.randn(2, 12), torch.tensor([step])
    chain, count = torch.randint(0, 9, (5, 2), dtype=torch.int32), torch.tensor([7, 8], dtype=torch.int32)
    for slots, row, dtype in ((cache, value, "float32"), (chain, count, "int32")):
        shape = tuple(slots.shape)
        read = run(slot_read(shape, dtype), slots, now, torch.zeros_like(row))[-1]
        assert torch.equal(read, fastcar.slot_read(slots, now))
        assert torch.equal(run(slot_write(shape, dtype), slots, row, now)[0], fastcar.slot_write(slots, row, now))
    inputs, x, replay = torch.randn(5, 2, 12), torch.randn(2, 12), torch.tensor([seed % 2 == 0, seed % 3 == 0])
    both = run(slots_write((5, 2, 12)), cache, inputs, value, x, replay, now)
    for found, expected in zip(both, fastcar.keep_frame(cache, inputs, value, x, replay, now), strict=False):
        assert torch.equal(found, expected)


@few
@given(st.lists(st.integers(1, 5), min_size=2, max_size=8), st.sampled_from([torch.float32, torch.bool]))
def test_joined_rows_follow_each_other(sizes: list[int], dtype: torch.dtype) -> None:
    rows = [torch.randint(0, 2, (n,)).to(dtype) for n in sizes]
    kernel = concat_rows(tuple(sizes), name_of(dtype))
    assert torch.equal(run(kernel, *rows, torch.zeros(sum(sizes), dtype=dtype))[-1], torch.cat(rows))


@few
@given(count=st.integers(2, 8), size=st.integers(1, 5))
def test_parts_are_in_order(count: int, size: int) -> None:
    whole = torch.arange(count * size).float()
    _, *parts = run(split_rows(count, size, "float32"), whole, *torch.full((count, size), -1.0))
    assert torch.equal(torch.stack(parts), whole.reshape(count, size))
