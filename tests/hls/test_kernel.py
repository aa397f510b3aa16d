"""The MLP kernel in C simulation against numpy and the PyTorch operators, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.csim import CsimLibrary
from fastcar_compile.codegen.hls.weights import pack_mlp
from fastcar_compile.errors import UserError
from fastcar_compile.ops import quant
from fastcar_compile.ops.activations import factor_table
from hls.library import DESIGNS, Array, Layer, accumulate, assert_same_bits, reference, sigmoid, sigmoid_table

RELAXED = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


P = ctypes.c_void_p


def rows(library: CsimLibrary, rng: np.random.Generator, exponent: float = 0.0) -> Array:
    """float32 [B, H] around 10 ** exponent."""
    return (rng.normal(size=(library.batch, library.hidden)) * 10.0**exponent).astype(np.float32)


@RELAXED
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-12, 12))
def test_every_row_pattern_is_bit_exact(library: CsimLibrary, design_name: str, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    layer = Layer.random(library.hidden, library.intermediate, rng)
    stream = pack_mlp(*layer.arguments, DESIGNS[design_name])
    x, cached = rows(library, rng, exponent), rows(library, rng)
    want = reference(x, layer)
    for register in range(1 << library.batch):
        computes = np.array([register >> b & 1 for b in range(library.batch)], bool)
        got = library.mlp(x, register, cached, stream)
        assert_same_bits(got, np.where(computes[:, None], want.y, cached))


@RELAXED
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-6, 6))
def test_accumulators_are_exact(library: CsimLibrary, design_name: str, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    layer = Layer.random(library.hidden, library.intermediate, rng)
    x = rows(library, rng, exponent)
    want = reference(x, layer)
    got = library.mlp_accumulators(x, pack_mlp(*layer.arguments, DESIGNS[design_name]))
    for sums, expected in zip(got, (want.gate, want.up, want.down), strict=True):
        np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e-31, 3e38, -3e38, 16.0, 0.5])
def test_constant_rows(library: CsimLibrary, design_name: str, value: float) -> None:
    rng = np.random.default_rng(1)
    layer = Layer.random(library.hidden, library.intermediate, rng)
    x = np.full((library.batch, library.hidden), value, np.float32)
    got = library.mlp(x, 0xFFFFFFFF, x, pack_mlp(*layer.arguments, DESIGNS[design_name]))
    with np.errstate(over="ignore", invalid="ignore"):
        want = reference(x, layer)
    if np.isfinite(want.y).all():
        assert_same_bits(got, want.y)


def test_extreme_weights_do_not_overflow(library: CsimLibrary, design_name: str) -> None:
    """All products are 127 * 127: the largest sums there are."""
    hidden, intermediate = library.hidden, library.intermediate
    one = np.float32(1e-4)
    wide, tall = np.full((intermediate, hidden), 127, np.int8), np.full((hidden, intermediate), -127, np.int8)
    scales_i, scales_h = np.full(intermediate, one), np.full(hidden, one)
    layer = Layer(wide, scales_i, wide, scales_i, tall, scales_h)
    x = np.ones((library.batch, hidden), np.float32)
    gate, _, down = library.mlp_accumulators(x, pack_mlp(*layer.arguments, DESIGNS[design_name]))
    assert (gate == 127 * 127 * hidden).all()
    assert (down == -127 * 127 * intermediate).all()


def test_weights_are_not_read_when_no_row_computes(library: CsimLibrary) -> None:
    """The address of the weights is null, so that a read would end the process; cached NaN payloads survive."""
    x = np.zeros((library.batch, library.hidden), np.float32)
    cached = np.arange(x.size, dtype=np.uint32).reshape(x.shape) | np.uint32(0x7F800000)
    y = np.zeros_like(x)
    library._library.fastcar_csim_mlp(x.ctypes.data_as(P), 0, cached.ctypes.data_as(P), None, y.ctypes.data_as(P))
    np.testing.assert_array_equal(y.view(np.uint32), cached)


def test_matches_the_pytorch_operators(library: CsimLibrary, design_name: str) -> None:
    rng = np.random.default_rng(7)
    layer = Layer.random(library.hidden, library.intermediate, rng)
    x = rows(library, rng)
    gate_q, gate_s, up_q, up_s, down_q, down_s = (torch.from_numpy(a) for a in layer.arguments)
    linear = torch.ops.fastcar.linear_w8a8
    g = linear(torch.from_numpy(x), gate_q, gate_s, None)
    u = linear(torch.from_numpy(x), up_q, up_s, None)
    a = g * torch.ops.fastcar.activation_factor(g, "silu") * u
    want = linear(a, down_q, down_s, None)
    got = library.mlp(x, 0xFFFFFFFF, x, pack_mlp(*layer.arguments, DESIGNS[design_name]))
    assert_same_bits(got, want.numpy())
    q, _ = quant.quantize_rows(torch.from_numpy(x))
    gate, up, _ = library.mlp_accumulators(x, pack_mlp(*layer.arguments, DESIGNS[design_name]))
    np.testing.assert_array_equal(gate, quant.accumulate(q, gate_q).numpy())
    np.testing.assert_array_equal(up, accumulate(q.numpy(), layer.up_q))


def test_reference_table_and_sigmoid_are_those_of_the_operators() -> None:
    np.testing.assert_array_equal(sigmoid_table(), factor_table("silu").numpy())
    x = np.linspace(-20, 20, 100_001, dtype=np.float32)
    assert_same_bits(sigmoid(x), torch.ops.fastcar.activation_factor(torch.from_numpy(x), "silu").numpy())


@pytest.mark.parametrize("design_name", ["example"], indirect=True)
def test_wrong_arrays_are_refused(library: CsimLibrary) -> None:
    x = np.zeros((2, 128), np.float32)
    with pytest.raises(UserError, match=r"x is float64 \[2, 128\]; the kernel takes float32 \[2, 128\]"):
        library.mlp(x.astype(np.float64), 0, x, np.zeros(library.stream_bytes, np.uint8))
    with pytest.raises(UserError, match=r"the weight stream is uint8 \[5\]; the kernel takes uint8 \[139072\]"):
        library.mlp(x, 0, x, np.zeros(5, np.uint8))


@pytest.mark.parametrize("design_name", ["example"], indirect=True)
def test_an_unaligned_stream_gives_the_same(library: CsimLibrary, design_name: str) -> None:
    rng = np.random.default_rng(3)
    layer = Layer.random(128, 352, rng)
    stream = pack_mlp(*layer.arguments, DESIGNS[design_name])
    buffer = np.empty(stream.size + 3, np.uint8)
    buffer[3:] = stream
    x = rows(library, rng)
    assert_same_bits(library.mlp(x, 3, x, buffer[3:]), reference(x, layer).y)
