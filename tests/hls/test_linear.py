"""The engine in C simulation: linears of random shapes and the MLP, bit for bit against numpy and PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.emit import emit_hls
from fastcar_compile.codegen.hls.engine_csim import EngineLibrary
from fastcar_compile.codegen.hls.linear_spec import LinearSpec
from fastcar_compile.codegen.hls.linear_weights import pack_linear
from fastcar_compile.codegen.hls.weights import LinearWeights, pack_mlp
from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.ops.quant import pack_int4
from hls.library import Array, assert_same_bits, random_layer, reference
from hls.linear_library import ENGINES, Linear

P = ctypes.c_void_p
Build = Callable[[str], EngineLibrary]
RELAXED = settings(
    max_examples=70, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def build_engine(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build_engine(name)`: the library of ENGINES[name]; needs `csim_tools`."""
    folder = tmp_path_factory.getbasetemp() / "engines"

    @cache
    def build(name: str) -> EngineLibrary:
        sources: Path = folder / name
        emit_hls(ENGINES[name], sources)
        return EngineLibrary.build(sources, folder / "libraries")

    return build


@pytest.fixture(params=["int4_one_port", "two_rows_per_core"])
def name(request: pytest.FixtureRequest) -> str:
    """The name of each engine in turn; tests/test_offload_linears.py runs the one of the shipped decoder."""
    return request.param


@pytest.fixture
def library(csim_tools: None, build_engine: Build, name: str) -> EngineLibrary:
    """The C simulation of ENGINES[name]."""
    return build_engine(name)


def rows(library: EngineLibrary, width: int, rng: np.random.Generator, exponent: float = 0.0) -> Array:
    """float32 [B, width] around 10 ** exponent."""
    return (rng.normal(size=(library.batch, width)) * 10.0**exponent).astype(np.float32)


@RELAXED
@given(
    seed=st.integers(0, 2**32 - 1),
    inputs=st.integers(1, 600),
    channels=st.integers(1, 700),
    biased=st.booleans(),
    exponent=st.floats(-12, 12),
)
def test_any_shape_and_any_rows_on_one_engine(
    library: EngineLibrary, name: str, seed: int, inputs: int, channels: int, biased: bool, exponent: float
) -> None:
    """One compiled engine takes every size that its buffers hold; rows that it does not compute stay as they were."""
    design, rng = ENGINES[name], np.random.default_rng(seed)
    stage = design.fit(LinearSpec("any", min(inputs, design.max_inputs), channels, biased))
    linear = Linear.random(design, stage, rng)
    x, before = rows(library, linear.stage.inputs, rng, exponent), rows(library, channels, rng)
    mask = int(rng.integers(0, 1 << library.batch))
    computes = np.array([mask >> b & 1 for b in range(library.batch)], bool)
    got = library.linear(x, linear.stage, linear.stream, mask, before)
    assert_same_bits(got, np.where(computes[:, None], linear.reference(x), before))


def test_calls_of_the_design_equal_the_operator(library: EngineLibrary, name: str) -> None:
    rng = np.random.default_rng(5)
    for stage in ENGINES[name].linears.values():
        linear, x = Linear.random(ENGINES[name], stage, rng), rows(library, stage.inputs, rng)
        weights = linear.weights
        values, scales = torch.from_numpy(weights.values), torch.from_numpy(weights.scales)
        arguments = (scales, None if weights.bias is None else torch.from_numpy(weights.bias))
        if stage.bits == 4:
            want = torch.ops.fastcar.linear_w4a8(torch.from_numpy(x), pack_int4(values), *arguments)
        else:
            want = torch.ops.fastcar.linear_w8a8(torch.from_numpy(x), values, *arguments)
        assert_same_bits(library.linear(x, stage, linear.stream), want.numpy())
        np.testing.assert_array_equal(library.linear_sums(x, stage, linear.stream), linear.sums(x))


@pytest.mark.parametrize("name", ["two_rows_per_core"], indirect=True)
def test_a_negative_zero_stays_one_without_a_bias(library: EngineLibrary) -> None:
    """Adding a bias of zero would make it positive."""
    stage = ENGINES["two_rows_per_core"].fit(LinearSpec("zero", 4, 4))
    weights = LinearWeights(np.ones((4, 4), np.int8), np.full(4, -1.0, np.float32))
    got = library.linear(np.zeros((library.batch, 4), np.float32), stage, pack_linear([weights], stage))
    assert (np.signbit(got) & (got == 0)).all()


def test_the_mlp_of_the_engine_is_bit_exact_for_every_row_pattern(library: EngineLibrary, name: str) -> None:
    design, rng = ENGINES[name].mlp, np.random.default_rng(2)
    layer = random_layer(design.spec, rng)
    stream = pack_mlp(layer, design)
    x, cached = rows(library, library.hidden, rng), rows(library, library.hidden, rng)
    want = reference(x, layer, design.spec)
    for register in range(1 << library.batch):
        computes = np.array([register >> b & 1 for b in range(library.batch)], bool)
        assert_same_bits(library.mlp(x, register, cached, stream), np.where(computes[:, None], want.y, cached))


def test_weights_are_not_read_without_a_row(library: EngineLibrary, name: str) -> None:
    """The address of the weights is null, so that a read would end the process."""
    stage = next(iter(ENGINES[name].linears.values()))
    x, y = np.zeros((library.batch, stage.inputs), np.float32), np.full((library.batch, stage.channels), 7, np.float32)
    sizes = (stage.inputs, stage.channels, stage.tile, stage.tiles)
    run = library._library.fastcar_csim_linear
    run(x.ctypes.data_as(P), 0, None, y.ctypes.data_as(P), 1, *sizes)
    assert (y == 7).all()
    run(x.ctypes.data_as(P), 0xFFFFFFFF, None, y.ctypes.data_as(P), 3, *sizes)  # 3 is no operation
    assert (y == 7).all()


@pytest.mark.parametrize("name", ["two_rows_per_core"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        {"inputs": 301},
        {"tiles": 3},
        {"channels": 100},
        {"tile": 1000},
        {"inputs": 0},
        {"tiles": -1},
        {"tile": 2**31 - 1},
    ],
    ids=str,
)
def test_a_request_beyond_the_buffers_is_refused(library: EngineLibrary, change: dict[str, int]) -> None:
    """The kernel itself checks: what does not fit, or does not cover the channels, writes nothing."""
    stage = ENGINES["two_rows_per_core"].linears["qkv"]
    asked = {k: getattr(stage, k) for k in ("inputs", "channels", "tile", "tiles")} | change
    x = np.zeros(400, np.float32)
    sums = np.full(400, 7, np.int32)
    done = library._library.fastcar_csim_linear_sums(
        x.ctypes.data_as(P), None, 1, *asked.values(), sums.ctypes.data_as(P)
    )
    assert done == 0
    assert (sums == 7).all()


@pytest.mark.parametrize("name", ["two_rows_per_core"], indirect=True)
def test_wrong_arrays_are_refused(library: EngineLibrary) -> None:
    stage = ENGINES["two_rows_per_core"].linears["qkv"]
    x, stream = np.zeros((5, 300), np.float32), np.zeros(stage.stream_bytes, np.uint8)
    with pytest.raises(UserError, match=r"x is float32 \[1, 300\]; the engine takes float32 \[5, 300\]"):
        library.linear(x[:1], stage, stream)
    with pytest.raises(UserError, match=r"the weight stream is uint8 \[3\]; the linear takes uint8 \[24576\]"):
        library.linear(x, stage, stream[:3])
    with pytest.raises(UserError, match="the engine has no room for LinearStage"):
        library.linear_sums(x, replace(stage, tiles=3), np.zeros(replace(stage, tiles=3).stream_bytes, np.uint8))
    with pytest.raises(CompileError, match="big has 400 inputs; the engine's buffers hold 300, and tiles of 64 words"):
        ENGINES["two_rows_per_core"].fit(LinearSpec("big", 400, 3))
