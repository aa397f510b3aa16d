"""The prefetch buffer of the weight stream: what it changes (nothing but where words come from), and its size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.csim import CsimLibrary
from fastcar_compile.codegen.hls.design import (
    PREFETCH_WORD_CHOICES,
    MlpDesign,
    choose_design,
    designs,
    excess,
    with_prefetch,
)
from fastcar_compile.codegen.hls.resources import Usage, bram_blocks, uram_blocks
from fastcar_compile.codegen.hls.spec import MlpSpec
from fastcar_compile.codegen.hls.weights import pack_mlp
from hls.library import DESIGNS, Array, assert_same_bits, design, random_layer, reference, zcu102
from hls.linear_library import ENGINES

HELD = [name for name, made in sorted(DESIGNS.items()) if made.prefetch_words]


def beheaded(stream: Array, made: MlpDesign) -> Array:
    """The stream with zeros in place of what the buffer holds of every section."""
    sections = stream.reshape(made.ports, -1).copy()
    sections[:, : 16 * made.prefetch_words] = 0
    return sections.reshape(-1)


def test_most_designs_of_the_tests_have_a_buffer() -> None:
    assert {"example", "tails", "int4", "two_ports_four_cores"} <= set(HELD)
    assert DESIGNS["eight_ports_one_row"].prefetch_words == 0  # a section of 57 words
    assert all(made.mlp.prefetch_words for made in ENGINES.values())


@pytest.mark.parametrize("design_name", HELD, indirect=True)
def test_the_beginning_of_the_weights_comes_from_the_buffer(library: CsimLibrary, design_name: str) -> None:
    """For every row pattern; memory holds zeros there. It can be taken again, and other weights replace it."""
    rng, made = np.random.default_rng(5), DESIGNS[design_name]
    x, cached = rng.normal(size=(2, library.batch, library.hidden)).astype(np.float32)
    assert library.prefetch_bytes == made.prefetch_bytes
    for _ in range(2):
        layer = random_layer(made.spec, rng)
        stream, want = pack_mlp(layer, made), reference(x, layer, made.spec).y
        library.prefetch(stream)
        for register in range(min(1 << library.batch, 16)):
            computes = np.array([register >> b & 1 for b in range(library.batch)], bool)
            expected = np.where(computes[:, None], want, cached)
            assert_same_bits(library.mlp(x, register, cached, beheaded(stream, made), held=True), expected)
            assert_same_bits(library.mlp(x, register, cached, stream), expected)


@pytest.mark.parametrize("design_name", ["tails"], indirect=True)
def test_what_is_not_said_to_be_held_is_read(library: CsimLibrary, design_name: str) -> None:
    rng, made = np.random.default_rng(6), DESIGNS[design_name]
    layer = random_layer(made.spec, rng)
    x = rng.normal(size=(library.batch, library.hidden)).astype(np.float32)
    stream, want = pack_mlp(layer, made), reference(x, layer, made.spec).y
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
    assume(any(not excess(d) for d in designs(spec, budget)))
    made = choose_design(spec, budget)
    bare = replace(made, prefetch_words=0, usage=design_usage(made))
    assert not excess(made)
    assert with_prefetch(bare) == made
    kind, blocks = ("uram", uram_blocks) if made.tiles_in_uram else ("bram36", bram_blocks)
    left = (getattr(made.budget, kind) - getattr(bare.usage, kind)) // 2
    fitting = [w for w in PREFETCH_WORD_CHOICES if w <= made.port_words and made.ports * blocks(128, w) <= left]
    assert made.prefetch_words == max(fitting, default=0)
    assert MlpDesign.from_json(made.to_json()) == made


def design_usage(made: MlpDesign) -> Usage:
    """The usage of a design without its buffer."""
    if not made.prefetch_words:
        return made.usage
    if made.tiles_in_uram:
        return replace(made.usage, uram=made.usage.uram - made.ports * uram_blocks(128, made.prefetch_words))
    return replace(made.usage, bram36=made.usage.bram36 - made.ports * bram_blocks(128, made.prefetch_words))


def test_seven_billion_parameters_have_the_longest_buffer() -> None:
    made = design(4096, 11008, 2, 2)
    assert (made.prefetch_words, made.prefetch_bytes) == (4096, 4 * 4096 * 16)
