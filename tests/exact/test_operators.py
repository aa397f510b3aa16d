"""The operators against the numpy reference bit for bit, and the reference against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import stored

from .cases import KINDS, attended, cache, same, values

fastcar = torch.ops.fastcar
many = settings(max_examples=60, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)
DIMS = st.sampled_from([1, 8, 32, 40, 64])


@many
@given(st.sampled_from(KINDS), st.integers(1, 200), st.sampled_from([1e-12, 1e-6, 1e-5]), SEEDS)
def test_norm(kind: str, width: int, epsilon: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, weight = values(kind, (3, width), random), values("normal", (width,), random)
    y = fastcar.exact_norm(torch.from_numpy(x), torch.from_numpy(weight), epsilon).numpy()
    assert same(y, exact.rms_norm(x, weight, epsilon))
    if kind in ("normal", "outlier"):
        wide = x.astype(np.float64)
        close = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * weight
        np.testing.assert_allclose(y, close, rtol=1e-4)


@many
@given(st.sampled_from(KINDS), st.integers(1, 200), st.sampled_from([1e-12, 1e-6, 1e-5]), SEEDS)
def test_layer_norm(kind: str, width: int, epsilon: float, seed: int) -> None:
    """Values far from zero among them: what is left without their mean is small."""
    random = np.random.default_rng(seed)
    x, (weight, bias) = values(kind, (3, width), random), values("normal", (2, width), random)
    x[1] += np.float32(64)
    y = fastcar.exact_layer_norm(*map(torch.from_numpy, (x, weight, bias)), epsilon).numpy()
    assert same(y, exact.layer_norm(x, weight, bias, epsilon))
    if kind in ("normal", "outlier") and width > 1:
        wide = x.astype(np.float64)
        scale = weight / np.sqrt(wide.var(-1, keepdims=True) + epsilon)
        close = (wide - wide.mean(-1, keepdims=True)) * scale + bias
        # The mean has 23 bits of the largest value, as a float32 has.
        allowed = np.abs(scale) * np.abs(wide).max(-1, keepdims=True) * 2.0**-22
        assert (np.abs(y - close) <= 1e-4 + 1e-4 * np.abs(close) + allowed).all()


@many
@given(st.sampled_from(KINDS), DIMS, SEEDS)
def test_cached_rows(kind: str, dim: int, seed: int) -> None:
    x = values(kind, (7, dim), np.random.default_rng(seed))
    assert np.array_equal(stored(torch.from_numpy(x), torch.int8).numpy(), exact.stored_rows(x))


@many
@given(st.integers(1, 3), st.sampled_from([(8, 8), (40, 16), (64, 32)]), st.integers(0, 12), SEEDS)
def test_rotary(steps: int, width: tuple[int, int], position: int, seed: int) -> None:
    """Positions past the end of the table, and a head that is rotated in part."""
    random = np.random.default_rng(seed)
    x, table = values("normal", (2, 3, steps, width[0]), random), values("normal", (9, width[1]), random)
    y = fastcar.exact_rotary(torch.from_numpy(x), torch.from_numpy(table), torch.tensor([position])).numpy()
    assert same(y, exact.rotary(x, table, position))


@many
@given(st.tuples(*[st.sampled_from(KINDS)] * 3), DIMS, st.integers(1, 3), st.integers(0, 70), SEEDS)
def test_attention(kinds: tuple[str, str, str], dim: int, steps: int, position: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = (1, 2, 70)
    query = values(kinds[0], (1, 4, steps, dim), random)
    keys, rows = (cache(kind, shape, dim, random) for kind in kinds[1:])
    given_ = [torch.from_numpy(a) for a in (query, keys, rows)]
    y = fastcar.exact_attention(*given_, torch.tensor([position]), 0.3).numpy()
    assert same(y, attended(query, keys, rows, position, 0.3))


@many
@given(
    st.sampled_from(KINDS),
    DIMS,
    st.integers(1, 3),
    st.integers(0, 90),
    st.integers(0, 3),
    st.integers(1, 40),
    st.integers(0, 3),
    SEEDS,
)
def test_window(kind: str, dim: int, steps: int, position: int, sinks: int, window: int, spare: int, seed: int) -> None:
    """Rings that are not yet full, that are just full, and that have gone round."""
    random = np.random.default_rng(seed)
    shape = (1, 1, sinks + window + steps - 1 + spare)
    query = values(kind, (1, 2, steps, dim), random)
    keys, rows = (cache(held, shape, dim, random) for held in (kind, "wide"))
    given_ = [torch.from_numpy(a) for a in (query, keys, rows)]
    y = fastcar.exact_window_attention(*given_, torch.tensor([position]), 0.3, sinks, window).numpy()
    assert same(y, attended(query, keys, rows, position, 0.3, (sinks, window)))


@pytest.mark.parametrize("position", [0, 5, 31, 32, 69])
def test_attention_is_near_that_of_floats(position: int) -> None:
    random = np.random.default_rng(position)
    query = torch.from_numpy(values("normal", (2, 4, 1, 64), random))
    keys, rows = (torch.from_numpy(cache("normal", (2, 2, 70), 64, random)) for _ in range(2))
    operands = (query, keys, rows, torch.tensor([position]), 0.125)
    torch.testing.assert_close(fastcar.exact_attention(*operands), fastcar.attention(*operands), atol=1e-3, rtol=0)


def test_numerators() -> None:
    """Powers of two are exact, and the error of any other is below 2^-20 and half a unit."""
    whole = np.arange(-30, 1).astype(np.float32)
    assert (exact.numerators(whole) == np.floor(2.0**24 * np.exp2(whole.astype(np.float64)) + 0.5)).all()
    points = np.linspace(-30, 0, 40001).astype(np.float32)
    true = np.exp2(points.astype(np.float64)) * 2**24
    step = 2.0**-17 * np.log(2)  # half a step of the input
    assert (np.abs(exact.numerators(points) - true) <= 0.51 + true * (step + 2.0**-20)).all()
    assert exact.numerators(np.array([-31, -1e30], np.float32)).tolist() == [0, 0]
