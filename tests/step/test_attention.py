"""Attention over an int8 cache in C simulation against the numpy reference, bit for bit."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from exact.cases import visible_rows

from fastcar_compile.codegen.hls.step_program.cache_layout import CacheLayout
from fastcar_compile.ir.exact import attention, logit_factor, numerators, stored_rows
from step.conftest import Cores
from step.values import Array, assert_same, random_row


def test_numerators(attention_cores: Cores) -> None:
    """Every step of the table's input near its ends, ties of the rounding, and what lies below the limit."""
    steps = np.concatenate([np.arange(0, 70000), np.arange(29 * 65536, 30 * 65536 + 9)]) / -65536
    ties = (np.arange(2000) + 0.5) / -65536
    given = np.concatenate([steps, ties, [-30.5, -1e9, -np.inf, -0.0]]).astype(np.float32)
    got = attention_cores("numerators", given, given.size, np.zeros(given.size, np.int32))[1]
    np.testing.assert_array_equal(got, numerators(given))


@dataclass(frozen=True)
class Case:
    """One query row of the heads that share a key head.

    Args:
        rows: filled rows of the cache. window: sinks, positions of the window, position of the query; None: no ring.
    """

    layout: CacheLayout
    heads: int
    rows: int
    window: tuple[int, int, int] | None = None

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Visible sinks, first row of the window, its length, first row of the ring, filled rows."""
        if self.window is None:
            return 0, 0, self.rows, 0, self.rows
        sinks, size, position = self.window
        ring = self.layout.positions - sinks
        count = min(size, position + 1 - sinks, ring)
        return sinks, sinks + (position + 1 - sinks - count) % ring, count, sinks, self.rows

    @property
    def visible(self) -> Array:
        """Which rows are seen."""
        if self.window is None:
            return visible_rows(self.rows, self.rows - 1)
        sinks, size, position = self.window
        return visible_rows(self.layout.positions, position, (sinks, size, position))


CASES = {
    "one port": Case(CacheLayout(1, 32, 40), 1, 33),
    "one row": Case(CacheLayout(4, 128, 64), 1, 1),
    "many ports": Case(CacheLayout(120, 64, 40), 1, 37),
    "many rows": Case(CacheLayout(4, 128, 256), 1, 251),
    "two heads": Case(CacheLayout(3, 96, 130), 2, 130),
    "two heads of a block": Case(CacheLayout(3, 32, 50), 2, 49),
    "window": Case(CacheLayout(4, 64, 70), 1, 70, (4, 20, 200)),
    "window that is not full": Case(CacheLayout(4, 64, 70), 1, 30, (4, 66, 29)),
}


def padded_row(values: Array) -> Array:
    """A row on chip, of 256 values."""
    return np.concatenate([values.reshape(-1), np.zeros(256 - values.size, np.float32)])


def agreed(attention_cores: Cores, case: Case, query: Array, keys: Array, values: Array, scale: float) -> Array:
    """Attention by the cores, held to the reference."""
    layout = case.layout
    sections = np.concatenate([layout.pack_keys(keys, 0), layout.pack_values(values, 0)], 1)
    given = (layout.ports, case.heads, padded_row(query), layout.blocks, sections, layout.key_words)
    *_, out, done = attention_cores(
        "attend", *given, layout.value_words, *case.place, float(logit_factor(scale)), np.zeros(256, np.float32)
    )
    got = out[: query.size].reshape(query.shape)
    assert done == 1
    visible = case.visible[: case.rows]
    with np.errstate(all="ignore"):
        want = [attention(head, keys[: case.rows], values[: case.rows], visible, logit_factor(scale)) for head in query]
    assert_same(got, np.stack(want))
    return got


@pytest.mark.parametrize("size", [0.1, 3.0, 200.0])
@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_cache(attention_cores: Cores, name: str, size: float) -> None:
    case, rng = CASES[name], np.random.default_rng(7)
    dim, count = case.layout.head_dim, case.layout.positions
    query = (rng.normal(size=(case.heads, dim)) * size).astype(np.float32)
    rows = (rng.normal(size=(2, count, dim)) * 10.0 ** rng.uniform(-2, 2, (2, count, 1))).astype(np.float32)
    keys, values = stored_rows(rows)
    scale = 1 / math.sqrt(dim)
    assert np.isfinite(agreed(attention_cores, case, query, keys, values, scale)).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["one port", "two heads", "window"])
def test_hostile_values(attention_cores: Cores, name: str, seed: int) -> None:
    """Any bits in the query and the cache, with and without values that are not finite."""
    case, rng = CASES[name], np.random.default_rng(seed)
    dim, count, hostile = case.layout.head_dim, case.layout.positions, seed % 2 == 0
    query = random_row(rng, case.heads, dim, hostile=hostile)
    rows = random_row(rng, 2, count, dim, hostile=not hostile)
    if seed < 4:
        query, rows = np.nan_to_num(query, nan=1.0), np.nan_to_num(rows, nan=2.0)
    keys, values = stored_rows(rows)
    if seed == 5:
        keys, values = rng.integers(-127, 128, (2, *keys.shape)).astype(np.int8)
    agreed(attention_cores, case, query, keys, values, 0.25)
