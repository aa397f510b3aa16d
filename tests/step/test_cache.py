"""Keys and values on the weight ports: the layout, and appending in C simulation against the cache of every backend."""

import numpy as np
import pytest
import torch

from fastcar_compile.codegen.hls.step_program.cache_layout import CacheLayout
from fastcar_compile.ir.ops.operator import stored
from step.conftest import Cores
from step.values import Array, random_row

LAYOUTS = [CacheLayout(1, 32, 20), CacheLayout(3, 96, 70), CacheLayout(4, 128, 40), CacheLayout(120, 32, 130)]
HEAD = 5
"""Number of the head; tests/step/cores.cpp has the same."""


def cached_rows(values: Array) -> Array:
    """int8 rows as eager stores them."""
    return stored(torch.from_numpy(values), torch.int8).numpy()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_layout_keeps_every_byte(layout: CacheLayout) -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(-128, 128, (layout.positions, layout.head_dim + layout.blocks)).astype(np.int8)
    keys, values = layout.pack_keys(rows, HEAD), layout.pack_values(rows, HEAD)
    assert keys.shape == (layout.ports, layout.key_words, 16)
    assert values.shape == (layout.ports, layout.value_words, 16)
    np.testing.assert_array_equal(layout.unpack_keys(keys, HEAD), rows)
    np.testing.assert_array_equal(layout.unpack_values(values, HEAD), rows)


def test_where_an_element_lies() -> None:
    """Element 40 of position 53 on three ports: row 1 of tile 1 of port (53 + 5) mod 3; byte 5 of tile 1 of values."""
    layout, rows = CacheLayout(3, 64, 70), np.zeros((70, 66), np.int8)
    rows[53, 40], rows[53, 64 + 1] = 5, 6
    keys, values = layout.pack_keys(rows, HEAD), layout.pack_values(rows, HEAD)
    assert (layout.key_tile_words, layout.value_tile_words) == (2 + 16 * 4, 2 + 2 * 11 * 2)
    assert keys[1, 66 + 2 + 1 * 4 + 2, 8] == 5
    assert keys[1, 66 + 1, 1] == 6
    assert values[40 % 32 % 3, 46 + 2 + (11 + 8 // 3) * 2 + 1, 5] == 5
    assert values[(2 * 1 + 1) % 3, 46 + (2 * 1 + 1) // 3, 5] == 6
    assert (np.count_nonzero(keys), np.count_nonzero(values)) == (2, 2)


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_are_appended_one_by_one(cores: Cores, layout: CacheLayout, hostile: bool) -> None:
    """What positions already hold stays; the second of two heads is stored."""
    rng = np.random.default_rng(layout.head_dim)
    new, dim = random_row(rng, 12, 2, layout.head_dim, hostile=hostile), layout.head_dim
    rows = rng.integers(-100, 100, (layout.positions, dim + layout.blocks)).astype(np.int8)
    keys, values = layout.pack_keys(rows, HEAD), layout.pack_values(rows, HEAD)
    places = rng.permutation(layout.positions)[:12]
    for row, position in zip(new, places.tolist(), strict=True):
        given = (layout.ports, row, dim // 4, layout.blocks, position)
        _, keys, values, done = cores("append", *given, keys, layout.key_words, values, layout.value_words)
        assert done == 1
        rows[position] = cached_rows(row[1])
    np.testing.assert_array_equal(layout.unpack_keys(keys, HEAD), rows)
    np.testing.assert_array_equal(layout.unpack_values(values, HEAD), rows)
