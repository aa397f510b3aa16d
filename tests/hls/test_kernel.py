"""The MLP kernel in C simulation against the PyTorch operators that define it, bit for bit."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.packing import pack_mlp
from hls.library import DESIGNS, assert_same_bits, random_layer, reference
from hls.simulation import NULL, Simulation, rows

RELAXED = settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@RELAXED
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-12, 12))
def test_row_patterns_are_exact(library: Simulation, design_name: str, seed: int, exponent: float) -> None:
    rng, made = np.random.default_rng(seed), DESIGNS[design_name]
    layer = random_layer(made.mlp, rng)
    stream = pack_mlp(layer, made)
    x, cached = rows(library, library.hidden, rng, exponent), rows(library, library.hidden, rng)
    want = reference(x, layer, made.mlp)
    # Up to six rows every pattern, beyond them 64 of the patterns in each example.
    for register in rng.permutation(1 << library.batch)[:64].tolist():
        computes = np.array([register >> b & 1 for b in range(library.batch)], bool)
        got = library.mlp(x, register, cached, stream)
        assert_same_bits(got, np.where(computes[:, None], want, cached))


def test_constant_rows(library: Simulation, design_name: str) -> None:
    made = DESIGNS[design_name]
    layer = random_layer(made.mlp, np.random.default_rng(1))
    stream = pack_mlp(layer, made)
    for value in (0.0, -0.0, 1e-40, 1e-31, 3e38, -3e38, 16.0, 0.5):
        x = np.full((library.batch, library.hidden), value, np.float32)
        got = library.mlp(x, 0xFFFFFFFF, x, stream)
        with np.errstate(over="ignore", invalid="ignore"):
            want = reference(x, layer, made.mlp)
        if np.isfinite(want).all():
            assert_same_bits(got, want)


def test_weights_are_not_read_when_no_row_computes(library: Simulation) -> None:
    """The address of the weights is null, so that a read would end the process; cached NaN payloads survive."""
    x = np.zeros((library.batch, library.hidden), np.float32)
    cached = np.arange(x.size, dtype=np.uint32).reshape(x.shape) | np.uint32(0x7F800000)
    kernel = library.kernel(np.zeros(library.design.stream_bytes, np.uint8))
    for name in library.unit.kernel.weights():
        library.unit.bind(name, NULL)
    y = kernel.mlp(0, x, 0, cached.view(np.float32))
    np.testing.assert_array_equal(y.view(np.uint32), cached)
