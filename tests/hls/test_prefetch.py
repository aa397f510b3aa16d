"""The prefetch buffer of the weight stream: what it changes (nothing but where words come from), and its size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import PREFETCH_WORD_CHOICES, designs
from fastcar_compile.codegen.hls.design.spec import MlpSpec
from fastcar_compile.codegen.hls.design.usage import prefetch_blocks
from fastcar_compile.codegen.hls.packing import pack_mlp
from hls.library import DESIGNS, Array, assert_same_bits, best, design, random_layer, reference, zcu102
from hls.simulation import Simulation

HELD = [name for name, made in sorted(DESIGNS.items()) if made.prefetch_words]


def beheaded(stream: Array, made: Design) -> Array:
    """The stream with zeros in place of what the buffer holds of every section."""
    sections = stream.reshape(made.axi_weight_ports, -1).copy()
    sections[:, : 16 * made.axi_words * made.prefetch_words] = 0
    return sections.reshape(-1)


def test_most_designs_of_the_tests_have_a_buffer() -> None:
    assert {"example", "tails", "int4", "two_ports_four_cores", "linears", "linears_int4"} <= set(HELD)
    assert DESIGNS["eight_ports_one_row"].prefetch_words == 0  # a section of 57 words


@pytest.mark.parametrize("design_name", HELD, indirect=True)
def test_the_beginning_of_the_weights_comes_from_the_buffer(library: Simulation, design_name: str) -> None:
    """For every row pattern; memory holds zeros there. It can be taken again, and other weights replace it."""
    rng, made = np.random.default_rng(5), DESIGNS[design_name]
    x, cached = rng.normal(size=(2, library.batch, library.hidden)).astype(np.float32)
    for _ in range(2):
        layer = random_layer(made.mlp, rng)
        stream, want = pack_mlp(layer, made), reference(x, layer, made.mlp).y
        library.prefetch(stream)
        for register in range(min(1 << library.batch, 16)):
            computes = np.array([register >> b & 1 for b in range(library.batch)], bool)
            expected = np.where(computes[:, None], want, cached)
            assert_same_bits(library.mlp(x, register, cached, beheaded(stream, made), held=True), expected)
            assert_same_bits(library.mlp(x, register, cached, stream), expected)


@pytest.mark.parametrize("design_name", ["tails"], indirect=True)
def test_what_is_not_said_to_be_held_is_read(library: Simulation, design_name: str) -> None:
    rng, made = np.random.default_rng(6), DESIGNS[design_name]
    layer = random_layer(made.mlp, rng)
    x = rng.normal(size=(library.batch, library.hidden)).astype(np.float32)
    stream, want = pack_mlp(layer, made), reference(x, layer, made.mlp).y
    library.prefetch(np.zeros_like(stream))
    assert_same_bits(library.mlp(x, 3, x, stream), want)
    assert not np.array_equal(library.mlp(x, 3, x, stream, held=True), want)


@settings(deadline=None)
@given(
    hidden=st.integers(1, 5000),
    intermediate=st.integers(1, 12000),
    bram36=st.integers(60, 800),
    uram=st.sampled_from([0, 64]),
)
def test_the_buffer_is_the_longest_in_half_of_what_is_left(
    hidden: int, intermediate: int, bram36: int, uram: int
) -> None:
    spec = MlpSpec(hidden=hidden, intermediate=intermediate, batch=1, layers=1, cores=1)
    budget = replace(zcu102(), bram36=bram36, uram=uram)
    found = list(designs(spec, budget))
    assume(any(not d.excess() for d in found))
    made = best(found)
    bare = replace(made, prefetch_words=0)
    assert not made.excess()
    left = (budget.bram36 - bare.usage.bram36) // 2
    fitting = []
    for words in PREFETCH_WORD_CHOICES:
        blocks = prefetch_blocks(made.ports, words)
        assert replace(made, prefetch_words=words).usage == replace(bare.usage, bram36=bare.usage.bram36 + blocks)
        fitting += [words] if words <= made.port_words and blocks <= left else []
    assert made.prefetch_words == max(fitting, default=0)
    assert Design.of(made.part) == made


def test_seven_billion_parameters_have_the_longest_buffer() -> None:
    made = design(4096, 11008, 2, 2)
    assert (made.prefetch_words, made.prefetch_bytes) == (4096, 4 * 4096 * 16)
