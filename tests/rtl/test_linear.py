"""A linear in RTL, from memory to memory: equal to the emitted C++ and to the operators that define it, bit for bit."""

import re
from pathlib import Path

import numpy as np
import pytest
from hls.library import DESIGNS, Array, Linear, assert_same_bits

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.model.engine import Memory
from fastcar_compile.codegen.hls.project import emit_hls
from rtl.conftest import Bench

OFTEN = ("int4",)
"""Designs of the default run: w4a8, two ports and five passes."""

MEMORIES = (
    Memory(100.0, 40, 0),
    Memory(1.3, 75, 0, refresh_interval=500, refresh=80),
    Memory(0.4, 3, 0, refresh_interval=97, refresh=20),
)
"""One that always has a word for every port, one with refreshes, and one that is slower than a port."""

names = pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(own, marks=pytest.mark.thorough) for own in DESIGNS if own not in OFTEN)]
)


def drawn_rows(made: Design, inputs: int, rng: np.random.Generator) -> Array:
    """float32 [B, K] of any size; one row in eight is zero."""
    x = rng.normal(size=(made.mlp.batch, inputs)) * 10.0 ** rng.uniform(-32, 30, (made.mlp.batch, 1))
    return np.where(rng.integers(0, 8, (made.mlp.batch, 1)) == 0, 0, x).astype(np.float32)


@names
def test_any_linear_by_any_memory(rtl_tools: None, linear_bench: Bench, name: str) -> None:
    """Shapes and rows at random, the result's port ready or not; rows that do not compute stay as they were."""
    made, bench, rng = DESIGNS[name], linear_bench(name), np.random.default_rng(5)
    for trial in range(6):
        inputs, channels = int(rng.integers(1, made.buffers.inputs + 1)), int(rng.integers(1, 120))
        product = made.fit(LinearSpec("any", inputs, channels, bool(rng.integers(2))))
        linear = Linear.random(made, product, rng)
        x, rows = drawn_rows(made, inputs, rng), int(rng.integers(1, 1 << made.mlp.batch))
        memory, held = MEMORIES[trial % 3], (0, 300)[trial // 3 % 2]
        found = bench.run(x, product, linear.stream, rows, memory, held=held)
        assert_same_bits(found.rtl, found.cpp)
        computes = np.array([rows >> b & 1 for b in range(made.mlp.batch)], bool)
        assert (found.rtl[~computes] == 7).all()
        assert_same_bits(found.rtl[computes, :channels], linear.reference(x)[computes])


@names
def test_every_linear_of_the_largest_buffers(rtl_tools: None, linear_bench: Bench, name: str) -> None:
    """The longest tiles and all rows: every place of every buffer is used."""
    made, bench, rng = DESIGNS[name], linear_bench(name), np.random.default_rng(6)
    for product in made.products:
        linear = Linear.random(made, product, rng)
        x = rng.normal(size=(made.mlp.batch, product.inputs)).astype(np.float32)
        found = bench.run(x, product, linear.stream, (1 << made.mlp.batch) - 1, MEMORIES[1])
        assert_same_bits(found.rtl, found.cpp)
        assert_same_bits(found.rtl[:, : product.channels], linear.reference(x))


@pytest.mark.parametrize("name", ["three_ports_in_pairs", "linears"])
def test_the_sizes_are_those_of_the_cpp(tmp_path: Path, name: str) -> None:
    """Both configurations of a project; the head's words are more than its scales'."""
    emit_hls(DESIGNS[name], tmp_path)
    cpp = dict(re.findall(r"static const int (\w+) = (\d+);", (tmp_path / "fastcar_config.hpp").read_text()))
    text = (tmp_path / "rtl" / "fastcar_rtl_config.svh").read_text()
    rtl = dict(re.findall(r"^`define FASTCAR_(\w+) (\d+)$", text, re.MULTILINE))
    renamed = {"ROWS": "BATCH", "MAX_SCALE_WORDS": "MAX_HEAD_WORDS"}
    assert 1 << int(rtl.pop("LIMIT_BITS")) == 16  # Factor<SILU>::LIMIT of fastcar_activation.hpp
    assert len(rtl) == 12
    assert f"FASTCAR_FIFO(ports, {rtl.pop('FIFO_WORDS')})" in (tmp_path / "fastcar_step.cpp").read_text()
    assert {size: cpp[renamed.get(size, size)] for size in rtl} == rtl
