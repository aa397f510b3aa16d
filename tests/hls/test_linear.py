"""The engine in C simulation: linears of random shapes, bit for bit against numpy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_linear
from fastcar_compile.errors import BackendError
from hls.library import DESIGNS, LINEARS, Linear, assert_same_bits
from hls.simulation import NULL, Simulation, rows

RELAXED = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
any_linears = pytest.mark.parametrize("design_name", LINEARS, indirect=True)
int8_linears = pytest.mark.parametrize("design_name", ["linears"], indirect=True)


@any_linears
@RELAXED
@given(
    seed=st.integers(0, 2**32 - 1),
    inputs=st.integers(1, 600),
    channels=st.integers(1, 700),
    biased=st.booleans(),
    exponent=st.floats(-12, 12),
)
def test_any_shape_and_any_rows_on_one_engine(
    library: Simulation, design_name: str, seed: int, inputs: int, channels: int, biased: bool, exponent: float
) -> None:
    """One compiled engine takes every size that its buffers hold; rows that it does not compute stay as they were."""
    design, rng = DESIGNS[design_name], np.random.default_rng(seed)
    product = design.fit(LinearSpec("any", min(inputs, design.buffers.inputs), channels, biased))
    linear = Linear.random(design, product, rng)
    x, before = rows(library, linear.product.inputs, rng, exponent), rows(library, channels, rng)
    mask = int(rng.integers(0, 1 << library.batch))
    computes = np.array([mask >> b & 1 for b in range(library.batch)], bool)
    got = library.linear(x, linear.product, linear.stream, mask, before)
    assert_same_bits(got, np.where(computes[:, None], linear.reference(x), before))


@int8_linears
def test_a_negative_zero_stays_one_without_a_bias(library: Simulation) -> None:
    """Adding a bias of zero would make it positive."""
    product = DESIGNS["linears"].fit(LinearSpec("zero", 4, 4))
    weights = LinearWeights(np.ones((4, 4), np.int8), np.full(4, -1.0, np.float32))
    got = library.linear(np.zeros((library.batch, 4), np.float32), product, pack_linear([weights], product))
    assert (np.signbit(got) & (got == 0)).all()


@any_linears
def test_weights_are_not_read_without_a_row(library: Simulation, design_name: str) -> None:
    """The address of the weights is null, so that a read would end the process."""
    product = next(iter(DESIGNS[design_name].linears.values()))
    kernel = library.kernel(np.zeros(product.stream_bytes, np.uint8), product)
    for name in library.unit.kernel.weights():
        library.unit.bind(name, NULL)
    library.unit.write("outputs", np.full((library.batch, product.channels), 7, np.float32).view(np.uint8).reshape(-1))
    x = np.zeros((library.batch, product.inputs), np.float32)
    assert (kernel.linear(0, x, 0).reshape(-1)[: product.channels] == 7).all()


@int8_linears
@pytest.mark.parametrize("change", [{"inputs": 301}, {"tile": 1000}], ids=str)
def test_a_request_beyond_the_buffers_is_refused(library: Simulation, change: dict[str, int]) -> None:
    """The kernel itself checks what does not fit."""
    product = replace(DESIGNS["linears"].linears["qkv"], **change)
    x = np.zeros((library.batch, product.inputs), np.float32)
    with pytest.raises(BackendError, match="stopped with status NOT_HELD at instruction 0"):
        library.linear(x, product, np.zeros(product.stream_bytes, np.uint8))
