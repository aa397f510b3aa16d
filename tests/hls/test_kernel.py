"""The MLP kernel in C simulation against numpy and the PyTorch operators, bit for bit."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.packing import LinearWeights, pack_mlp
from fastcar_compile.errors import UserError
from fastcar_compile.ir.ops import linear as activations
from fastcar_compile.ir.ops import linear as quant
from hls.library import DESIGNS, Array, assert_same_bits, random_layer, reference
from hls.simulation import Simulation

RELAXED = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


NULL = SimpleNamespace(ctypes=SimpleNamespace(data=None))
"""A buffer at address 0."""


def rows(library: Simulation, rng: np.random.Generator, exponent: float = 0.0) -> Array:
    """float32 [B, H] around 10 ** exponent."""
    return (rng.normal(size=(library.batch, library.hidden)) * 10.0**exponent).astype(np.float32)


@RELAXED
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-12, 12))
def test_every_row_pattern_is_bit_exact(library: Simulation, design_name: str, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    layer = random_layer(DESIGNS[design_name].mlp, rng)
    stream = pack_mlp(layer, DESIGNS[design_name])
    x, cached = rows(library, rng, exponent), rows(library, rng)
    want = reference(x, layer, DESIGNS[design_name].mlp)
    for register in range(1 << library.batch):
        computes = np.array([register >> b & 1 for b in range(library.batch)], bool)
        got = library.mlp(x, register, cached, stream)
        assert_same_bits(got, np.where(computes[:, None], want.y, cached))


@RELAXED
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-6, 6))
def test_accumulators_are_exact(library: Simulation, design_name: str, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    layer = random_layer(DESIGNS[design_name].mlp, rng)
    x = rows(library, rng, exponent)
    want = reference(x, layer, DESIGNS[design_name].mlp)
    got = library.mlp_sums(x, pack_mlp(layer, DESIGNS[design_name]))
    for sums, expected in zip(got, want.sums, strict=True):
        np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e-31, 3e38, -3e38, 16.0, 0.5])
def test_constant_rows(library: Simulation, design_name: str, value: float) -> None:
    rng = np.random.default_rng(1)
    layer = random_layer(DESIGNS[design_name].mlp, rng)
    x = np.full((library.batch, library.hidden), value, np.float32)
    got = library.mlp(x, 0xFFFFFFFF, x, pack_mlp(layer, DESIGNS[design_name]))
    with np.errstate(over="ignore", invalid="ignore"):
        want = reference(x, layer, DESIGNS[design_name].mlp)
    if np.isfinite(want.y).all():
        assert_same_bits(got, want.y)


def test_extreme_weights_do_not_overflow(library: Simulation, design_name: str) -> None:
    """All products are as large as they can be: the largest sums there are, of packed products too."""
    made = DESIGNS[design_name]
    layer = random_layer(made.mlp, np.random.default_rng(0))
    most = 127 if made.mlp.weight_bits == 8 else 7
    for linear, sign in zip(layer, (1, 1, -1), strict=False):
        linear.values[linear.values != 0] = sign * most
        linear.scales[:] = 1e-4
    x = np.ones((library.batch, library.hidden), np.float32)
    got, want = library.mlp_sums(x, pack_mlp(layer, made)), reference(x, layer, made.mlp)
    for sums, expected in zip(got, want.sums, strict=True):
        np.testing.assert_array_equal(sums, expected)
    assert want.sums[0].max() > 126 * most * min(library.hidden, 128) * 0.9


def test_weights_are_not_read_when_no_row_computes(library: Simulation) -> None:
    """The address of the weights is null, so that a read would end the process; cached NaN payloads survive."""
    x = np.zeros((library.batch, library.hidden), np.float32)
    cached = np.arange(x.size, dtype=np.uint32).reshape(x.shape) | np.uint32(0x7F800000)
    kernel = library.kernel(np.zeros(library.design.stream_bytes, np.uint8))
    for name in library.unit.kernel.weights():
        library.unit.bind(name, NULL)
    y = kernel.mlp(0, x, 0, cached.view(np.float32))
    np.testing.assert_array_equal(y.view(np.uint32), cached)


def torch_linear(x: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
    """One linear by the operator of its quantisation."""
    values, scales = torch.from_numpy(weights.values), torch.from_numpy(weights.scales)
    bias = None if weights.bias is None else torch.from_numpy(weights.bias)
    if scales.dtype == torch.float16:
        return torch.ops.fastcar.linear_w4a8(x, quant.pack_int4(values), scales, bias)
    return torch.ops.fastcar.linear_w8a8(x, values, scales, bias)


def test_matches_the_pytorch_operators(library: Simulation, design_name: str) -> None:
    rng, made = np.random.default_rng(7), DESIGNS[design_name]
    layer = random_layer(made.mlp, rng)
    x = torch.from_numpy(rows(library, rng))
    first = [torch_linear(x, weights) for weights in layer[:-1]]
    a = first[0] * torch.ops.fastcar.activation_factor(first[0], made.mlp.activation)
    want = torch_linear(a * first[1] if made.mlp.gated else a, layer[-1])
    got = library.mlp(x.numpy(), 0xFFFFFFFF, x.numpy(), pack_mlp(layer, made))
    assert_same_bits(got, want.numpy())
    q, _ = quant.quantize_rows(x)
    values = torch.from_numpy(layer[0].values)
    sums = library.mlp_sums(x.numpy(), pack_mlp(layer, made))[0]
    if made.mlp.weight_bits == 8:
        np.testing.assert_array_equal(sums, quant.accumulate(q, values).numpy())
    else:
        expected = quant.accumulate_groups(q, quant.pack_int4(values)).permute(1, 2, 0)
        np.testing.assert_array_equal(sums, expected.numpy())


LIMITS = {"silu": 16.0, "gelu": 8.0, "gelu_tanh": 8.0}


def factor_table(activation: str) -> Array:
    """int64 [513]: the factor at 513 knots on [-limit, limit], times 2**24, from its formula."""

    def factor(x: float) -> float:
        if activation == "gelu":
            return 0.5 * math.erfc(-x / math.sqrt(2))
        z = x if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 1 / (1 + math.exp(-z)) if z > -700 else 0.0

    limit = LIMITS[activation]
    return np.rint([2.0**24 * factor(j * limit / 256 - limit) for j in range(513)]).astype(np.int64)


def factor(x: Array, activation: str) -> Array:
    """Table factor of float32 values, in numpy."""
    limit, table = np.float32(LIMITS[activation]), factor_table(activation)
    fixed = np.rint(np.clip(x, -limit, limit) * (np.float32(16384) / limit)).astype(np.int64) + 16384
    index = np.minimum(fixed >> 6, 511)
    fraction = fixed - (index << 6)
    knots = (table[index] * (64 - fraction) + table[index + 1] * fraction + 32) >> 6
    return knots.astype(np.float32) * np.float32(2.0**-24)


@pytest.mark.parametrize("activation", sorted(LIMITS))
def test_reference_factors_are_those_of_the_operators(activation: str) -> None:
    np.testing.assert_array_equal(factor_table(activation), activations.factor_table(activation).numpy())
    x = np.linspace(-20, 20, 100_001, dtype=np.float32)
    assert_same_bits(factor(x, activation), activations.activation_factor(torch.from_numpy(x), activation).numpy())


@pytest.mark.parametrize("design_name", ["example"], indirect=True)
def test_wrong_arrays_are_refused(library: Simulation) -> None:
    x = np.zeros((2, 128), np.float32)
    with pytest.raises(UserError, match=r"x is float64 \[2, 128\]; the kernel takes float32 \[2, 128\]"):
        library.mlp(x.astype(np.float64), 0, x, np.zeros(library.design.stream_bytes, np.uint8))


@pytest.mark.parametrize("design_name", ["example"], indirect=True)
def test_an_unaligned_stream_gives_the_same(library: Simulation, design_name: str) -> None:
    rng = np.random.default_rng(3)
    layer = random_layer(DESIGNS[design_name].mlp, rng)
    stream = pack_mlp(layer, DESIGNS[design_name])
    buffer = np.empty(stream.size + 3, np.uint8)
    buffer[3:] = stream
    x = rows(library, rng)
    assert_same_bits(library.mlp(x, 3, x, buffer[3:]), reference(x, layer, DESIGNS[design_name].mlp).y)
