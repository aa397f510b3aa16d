"""Rows on chip against numpy, bit for bit: residual, rotary position embedding, RMSNorm and what a mean leaves."""

import numpy as np
import pytest

from fastcar_compile.ir import exact
from step.conftest import Cores
from step.values import Array, assert_same, random_row


def places(source: Array, target: Array | None = None) -> Array:
    """Two rows on chip, of 256 values each."""
    rows = np.zeros((2, 256), np.float32)
    rows[0, : source.size] = source.reshape(-1)
    if target is not None:
        rows[1, : target.size] = target
    return rows


@pytest.mark.parametrize("hostile", [False, True])
def test_the_residual_is_one_addition(cores: Cores, hostile: bool) -> None:
    rng = np.random.default_rng(1)
    x, y = random_row(rng, 2, 256, hostile=hostile)
    with np.errstate(invalid="ignore", over="ignore"):
        want = np.concatenate([x[:240] + y[:240], x[240:]])
    assert_same(cores("add", places(y, x), 60)[0], np.stack([y, want]))


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(1, 8, 8), (3, 32, 32), (2, 80, 32), (4, 64, 64), (5, 16, 8)])
def test_half_rotation(cores: Cores, heads: int, dim: int, rotary: int, hostile: bool) -> None:
    rng = np.random.default_rng(dim)
    x = random_row(rng, heads, dim, hostile=hostile)
    cosine, sine = random_row(rng, 2, rotary // 2, hostile=False)
    first, second, rest = np.split(x, [rotary // 2, rotary], 1)
    with np.errstate(invalid="ignore", over="ignore"):
        want = np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], 1)
    got = cores("rotate", places(x)[:1], cosine, sine, x.size // 4, dim // 4, rotary // 8)[0]
    assert_same(got, places(want)[:1])


@pytest.mark.parametrize("size", [-44, -30, -8, -3, 0, 3, 18, 33])
@pytest.mark.parametrize(("count", "epsilon"), [(256, 1e-5), (12, 1e-6), (4, 0.0), (132, 1e-12)])
def test_root_mean_square(cores: Cores, count: int, epsilon: float, size: int) -> None:
    """Rows of all magnitudes, equal values, an outlier, zeros; the first words are another row's."""
    rng = np.random.default_rng(count)
    rows = (rng.normal(size=(6, count)) * 10.0**size).astype(np.float32)
    rows[1] = rows[1, 0]
    rows[2, -1] *= np.float32(1e4)
    rows[3, 1:] = 0
    rows[4] *= np.exp2(rng.integers(-24, 1, count)).astype(np.float32)
    rows[5, rng.integers(count)] = (np.nan, np.inf, -np.inf)[count % 3]
    weight = rng.normal(size=count).astype(np.float32)
    words, before = count // 4, 64 - count // 4
    for row in (*rows, np.zeros(count, np.float32)):
        x = np.concatenate([np.ones(4 * before, np.float32), row])
        with np.errstate(all="ignore"):
            got = cores("normalize", places(x), before, words, weight, float(np.float32(1 / count)), epsilon)[0]
            want = exact.rms_norm(row, weight, epsilon)
        assert_same(got, np.stack([x, places(np.concatenate([np.zeros(4 * before, np.float32), want]))[0]]))


def centered(x: Array) -> Array:
    """docs/reference/numerics.md in numpy, one row of finite values."""
    place = max(int(np.abs(x).max().view(np.uint32) >> 23), 94) - 149
    whole = [int(f) for f in np.rint(np.ldexp(x.astype(np.float64), -place))]
    return x - np.float32(sum(whole)) * np.float32(1 / x.size) * np.float32(2.0**place)


@pytest.mark.parametrize("size", [-30, -8, 0, 3, 33])
@pytest.mark.parametrize("count", [256, 12, 4, 132])
def test_what_the_mean_leaves(cores: Cores, count: int, size: int) -> None:
    """Rows of all magnitudes, far from zero, an outlier; a value that is not finite stays so."""
    rng = np.random.default_rng(count)
    rows = (rng.normal(size=(5, count)) * 10.0**size).astype(np.float32)
    rows[1] += 100 * rows[1, 0]
    rows[2, -1] *= np.float32(1e4)
    rows[3] = rows[3, 0]
    rows[4] *= np.exp2(rng.integers(-24, 1, count)).astype(np.float32)
    words, before = count // 4, 64 - count // 4
    own = float(np.float32(1 / count))
    x = np.ones(256, np.float32)
    for row in rows:
        x[4 * before :] = row
        got = cores("center", places(x), before, words, own)[0]
        assert_same(got[1, 4 * before :], centered(row))
    for x[-1] in (np.nan, np.inf):
        assert not np.isfinite(cores("center", places(x), before, words, own)[0][1, -1])
