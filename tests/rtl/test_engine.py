"""The engine in RTL, from memory to memory, bit for bit as the emitted C++ and the operators that define it."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hls.library import DESIGNS, Array

from fastcar_compile.codegen.hls.design import usage
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.loops import places_loop
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.model.engine import Engine, EngineMemory
from fastcar_compile.codegen.hls.project import emit_hls, table_of_sizes
from fastcar_compile.config.targets import load_target
from rtl.conftest import RELU_DESIGNS, Bench
from rtl.simulation import Work

OFTEN = ("int4",)
"""Designs of the default run: w4a8, gated by a table, with biases and five passes; w8a8, plain, two cores."""

MEMORIES = (
    (EngineMemory(100.0, 40, 0), 0),
    (EngineMemory(1.3, 75, 0, refresh_interval=500, refresh=80), 300),
    (EngineMemory(0.4, 3, 0, refresh_interval=97, refresh=20), 300),
)
"""One that always has a word for every port, one with refreshes, and one that is slower than a port; beside them
the clocks of a thousand in which the result's port is not ready."""

ALL = [*DESIGNS, *RELU_DESIGNS]
names = pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(own, marks=pytest.mark.thorough) for own in ALL if own not in OFTEN)]
)


def drawn_rows(made: Design, inputs: int, rng: np.random.Generator, least: int, most: int) -> Array:
    """float32 [B, K] of sizes between these powers of ten; one row in eight is zero."""
    x = rng.normal(size=(made.mlp.batch, inputs)) * 10.0 ** rng.uniform(least, most, (made.mlp.batch, 1))
    return np.where(rng.integers(0, 8, (made.mlp.batch, 1)) == 0, 0, x).astype(np.float32)


@names
def test_mlps_and_linears_by_any_memory(rtl_tools: None, engine_bench: Bench, name: str) -> None:
    """The design's own products with all rows, which use every place of the buffers; shapes and rows at random."""
    bench, rng = engine_bench(name), np.random.default_rng(7)
    made, every = bench.design, (1 << bench.design.mlp.batch) - 1
    for number, (memory, held) in enumerate(MEMORIES):
        rows = int(rng.integers(1, every + 1)) if number else every
        bench.run(Work.mlp(made, drawn_rows(made, made.mlp.hidden, rng, -9, 9), rng), rows, memory, held=held)
        shape = int(rng.integers(1, made.buffers.inputs + 1)), int(rng.integers(1, 120))
        for product in (*made.linears.values(), made.fit(LinearSpec("any", *shape, bool(rng.integers(2))))):
            rows = every if product in made.linears.values() else int(rng.integers(1, every + 1))
            x = drawn_rows(made, product.inputs, rng, -32, 30)
            bench.run(Work.linear(made, product, x, rng), rows, memory, held=held)


def test_clocks_are_those_of_the_closed_form(rtl_tools: None, engine_bench: Bench) -> None:
    """Of an MLP and a linear, of all rows and of some, with a board's memory and one that is slower than the ports;
    test_cycles.py has large designs."""
    bench, rng, target = engine_bench(OFTEN[0]), np.random.default_rng(0), load_target("zcu102")
    made, linear = bench.design, LinearSpec("any", 300, 500)
    engine, product = Engine(made, target, table_of_sizes(made)), made.fit(linear)
    mlp = [LinearSpec("", own.inputs, own.channels) for own in (made.gate_up, made.down)]
    x = [rng.normal(size=(made.mlp.batch, size)).astype(np.float32) for size in (made.mlp.hidden, product.inputs)]
    work = (mlp, Work.mlp(made, x[0], rng)), ([linear], Work.linear(made, product, x[1], rng))
    for rate, rows, (shapes, asked) in itertools.product((engine.memory.rate, 0.5), (0b11111, 0b00001), work):
        engine.memory = replace(engine.memory, rate=rate)
        load = replace(made.load(rows.bit_count()), bypasses=True)
        parts = engine.parts(engine.array_call(shapes, load, on_chip=True, stays=True))
        model = sum(part.seconds for part in parts if part.unit != "drs") * engine.clock_hz - places_loop().cycles
        assert bench.run(asked, rows, engine.memory) == pytest.approx(model, rel=0.03)


@pytest.mark.parametrize("name", ["three_ports_in_pairs", "linears"])
def test_the_sizes_are_those_of_the_cpp(tmp_path: Path, name: str) -> None:
    """Both configurations of a project; the head's words are more than its scales'."""
    emit_hls(DESIGNS[name], tmp_path)
    cpp = dict(re.findall(r"static const int (\w+) = (\d+);", (tmp_path / "fastcar_config.hpp").read_text()))
    text = (tmp_path / "rtl" / "fastcar_rtl_config.svh").read_text()
    rtl = dict(re.findall(r"^`define FASTCAR_(\w+) (\d+)$", text, re.MULTILINE))
    renamed = {"ROWS": "BATCH", "MAX_SCALE_WORDS": "MAX_HEAD_WORDS"}
    assert 1 << int(rtl.pop("LIMIT_BITS")) == 16  # Factor<SILU>::LIMIT of fastcar_tables.hpp
    assert rtl.pop("GATED") == "1"
    assert len(rtl) == 12
    assert int(rtl.pop("FIFO_WORDS")) * int(rtl["AXI_WORDS"]) == usage.STEP_FIFO_WORDS
    assert {size: cpp[renamed.get(size, size)] for size in rtl} == rtl
