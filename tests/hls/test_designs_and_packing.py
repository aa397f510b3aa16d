"""The choice of the design, and how its weights are packed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.artifact.accelerator_section import DesignPart
from fastcar_compile.artifact.engine import MlpSpec
from fastcar_compile.codegen.hls import packing
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import designs
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.design.usage import READS, WRITES
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_linear, pack_mlp
from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.ir.ops.linear import pack_int4
from hls.library import DESIGNS, LINEARS, Linear, best, design, random_layer, zcu102


@settings(deadline=None)
@given(
    hidden=st.integers(1, 9000),
    intermediate=st.integers(1, 20000),
    batch=st.integers(1, 4),
    ports=st.integers(3, 12),
    linear=st.tuples(st.integers(1, 9000), st.integers(1, 40_000), st.booleans()),
)
def test_designs_keep_their_budget_and_cover_every_channel(
    hidden: int, intermediate: int, batch: int, ports: int, linear: tuple[int, int, bool]
) -> None:
    made, budget = design(hidden, intermediate, batch, batch, ports, linears=[("a", *linear)]), zcu102(ports)
    assert made.ports + 2 <= ports
    assert not made.usage.over(budget)
    assert [p.channels for p in made.products] == [2 * intermediate, hidden, linear[1]]
    for product in made.products:
        channels = product.tile * product.ports
        assert (product.tiles - 1) * channels < product.channels <= product.tiles * channels
        assert channels % 4 == 0
        assert product.inputs <= made.buffers.inputs
        assert product.tile_words <= made.buffers.tile_words
        assert product.head_words <= made.buffers.head_words
    again = made.fit(LinearSpec("a", *linear))
    assert again.tile_words <= made.buffers.tile_words
    assert again.tiles * again.tile * again.ports >= linear[1]


LLAMA_7B_LINEARS = (("layer_0.qkv", 4096, 12288, False), ("layer_0.o", 4096, 4096, False), ("head", 4096, 32000, False))


@pytest.mark.parametrize("linears", [(), LLAMA_7B_LINEARS], ids=["mlp", "linears"])
def test_the_seven_billion_parameter_shape_fits_zcu102(linears: tuple[tuple[str, int, int, bool], ...]) -> None:
    """Buffers are those of the widest use, down's 11008 inputs."""
    made = design(4096, 11008, 2, 2, layers=32, linears=linears)
    assert (made.ports, made.lanes, made.buffers.inputs) == (4, 128, 11008)
    assert made.usage.bram36 <= 912 * 80 // 100
    assert Design.of(DesignPart.model_validate_json(made.part.model_dump_json())) == made
    for name in made.linears:
        if name == "head":
            head = made.linears[name]
            assert 32000 * (4096 + 4) <= head.stream_bytes <= 32000 * (4096 + 16) + 4 * 4096
            # Memory-bound: a port gives a word per clock, and everything else adds less than a tenth.
            assert head.port_words <= made.cycles("head") <= 1.1 * head.port_words


def test_more_cores_share_the_ports_and_the_tiles() -> None:
    """Two cores more cost multipliers and rows, no weight port and no copy of a tile."""
    four, eight = (design(128, 352, 32, cores, quant="w4a8") for cores in (4, 8))
    assert four.ports == eight.ports == 4
    assert (four.passes, eight.passes) == (8, 4)
    assert eight.lanes == 2 * four.lanes == 1024
    wider = replace(four, mlp=replace(four.mlp, cores=8))
    assert wider.usage.dsp > four.usage.dsp
    assert replace(wider, tiles_in_uram=True).usage.uram == replace(four, tiles_in_uram=True).usage.uram > 0


@pytest.mark.parametrize(("beat", "read", "write"), [(16, 4, 2), (32, 4, 4), (64, 8, 8)])
def test_an_axi_port_has_room_for_all_that_is_under_way(beat: int, read: int, write: int) -> None:
    """Blocks of 36 bits: 128 data bits and 16 strobes are four halves, 512 data bits are 15, with strobes 16."""
    assert READS.beats(beat) * READS.outstanding * beat == 16384
    assert WRITES.beats(beat) * WRITES.outstanding * beat == 8192
    assert (READS.blocks(beat), WRITES.blocks(beat)) == (read, write)


def test_what_cannot_be_built_is_told() -> None:
    spec = MlpSpec(hidden=128, intermediate=352, batch=2, layers=4, cores=2)
    with pytest.raises(UserError, match=r"has 2 memory port.s. of 128 bits; the engine needs 3 of 128"):
        best(designs(spec, zcu102(2)))
    known = "act one of silu, gelu, gelu_tanh, relu, relu2, and w8a8 or w4a8"
    with pytest.raises(UserError, match=f"(?s)no HLS kernel for a plain w8a8 MLP with activation 'tanh'.*{known}"):
        best(designs(replace(spec, activation="tanh", gated=False), zcu102()))
    with pytest.raises(UserError, match=r"batch = 33 .*; cores = 0 "):
        best(designs(replace(spec, batch=33, cores=0), zcu102()))
    wide = [LinearSpec("a", 1 << 17, 3), LinearSpec("b", 3, 1 << 19)]
    with pytest.raises(CompileError, match=r"65536 inputs and 262144 channels: a is 131072 -> 3; b is 3 -> 524288"):
        best(designs(spec, zcu102(), wide))


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(LINEARS),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    inputs=st.integers(1, 300),
    biased=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_a_linear_puts_every_value_where_the_kernel_reads_it(
    name: str, sizes: list[int], inputs: int, biased: bool, seed: int
) -> None:
    made, rng = DESIGNS[name], np.random.default_rng(seed)
    product = made.fit(LinearSpec("any", inputs, sum(sizes), biased))
    weights = Linear.random(made, product, rng).weights
    cuts = np.cumsum(sizes)[:-1]
    biases = [None] * len(sizes) if weights.bias is None else np.split(weights.bias, cuts)
    parts = zip(np.split(weights.values, cuts), np.split(weights.scales, cuts), biases, strict=True)
    stream = pack_linear([LinearWeights(*part) for part in parts], product)
    assert stream.shape == (product.stream_bytes,)
    sections = stream.reshape(product.ports, -1)
    used = 16 * (product.head_words + product.tile_words)
    assert not sections[:, product.tiles * used :].any()
    for channel in range(product.channels):
        row, port = divmod(channel, product.ports)
        t, j = divmod(row, product.tile)
        tile = sections[port, t * used : (t + 1) * used]
        scales = tile[: 16 * product.scale_words].view(weights.scales.dtype)[: product.tile * product.sums]
        np.testing.assert_array_equal(scales.reshape(product.tile, -1)[j], weights.scales[channel].reshape(-1))
        if weights.bias is not None:
            assert tile[16 * product.scale_words + 4 * j :][:4].view("<f4")[0] == weights.bias[channel]
        row = tile[16 * product.head_words :].reshape(product.tile, -1, 16)[j].view(np.int8)
        if product.bits == 4:  # of a word's 32 values, the first 16 are the low nibbles
            row = np.stack([np.left_shift(row, 4) >> 4, row >> 4], axis=1)
        np.testing.assert_array_equal(row.reshape(-1)[:inputs], weights.values[channel, :inputs])
        assert not row.reshape(-1)[inputs:].any()


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("block", [1, 3000])
def test_streams_do_not_depend_on_blocks_and_may_start_from_packed_values(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rng = DESIGNS[name], np.random.default_rng(0)
    linear, layer = Linear.random(made, made.fit(LinearSpec("any", 300, 70, True)), rng), random_layer(made.mlp, rng)
    whole = linear.stream, pack_mlp(layer, made)
    monkeypatch.setattr(packing, "_BLOCK_BYTES", block)

    def packed(weights: LinearWeights) -> LinearWeights:
        values = torch.from_numpy(weights.values)
        return replace(weights, values=pack_int4(values).numpy()) if made.mlp.weight_bits == 4 else weights

    blocks = replace(linear, weights=packed(linear.weights)).stream, pack_mlp([packed(n) for n in layer], made)
    for one, other in zip(whole, blocks, strict=True):
        np.testing.assert_array_equal(one, other)
