"""Random configurations of the engine without linears, bit for bit against numpy. FASTCAR_HLS_CONFIGS sets how many."""

import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fastcar_compile.artifact.engine import WEIGHT_BITS, MlpSpec
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import designs
from fastcar_compile.codegen.hls.design.spec import ACTIVATIONS
from fastcar_compile.codegen.hls.packing import pack_mlp
from hls.library import assert_same_bits, best, random_layer, reference, zcu102
from hls.simulation import Simulation

COUNT = int(os.environ.get("FASTCAR_HLS_CONFIGS", "6"))
KINDS = list(product(WEIGHT_BITS, (True, False), ACTIVATIONS))
SIZES = (1, 3, 16, 17, 32, 100, 127, 128, 129, 160, 255, 256, 300)


def random_design(number: int) -> Design:
    """Design `number`: quantisation, kind and activation in turn, everything else drawn."""
    rng = np.random.default_rng(number)
    quant, gated, activation = KINDS[number % len(KINDS)]
    batch = int(rng.choice([1, 2, 3, 4, 5, 8, 11, 16, 31, 32]))
    spec = MlpSpec(
        hidden=int(rng.choice(SIZES)) if rng.random() < 0.7 else int(rng.integers(1, 400)),
        intermediate=int(rng.choice(SIZES)) if rng.random() < 0.7 else int(rng.integers(1, 400)),
        batch=batch,
        layers=1,
        cores=int(rng.integers(1, min(batch, 6) + 1)),
        activation=activation,
        gated=gated,
        quant=quant,
        up_bias=bool(rng.integers(2)),
        down_bias=bool(rng.integers(2)),
    )
    # A large device, so that the number of ports is what was drawn and not what fits.
    budget = zcu102(int(rng.choice([3, 4, 5, 6, 8, 10])), int(rng.choice([128, 128, 256, 512])))
    budget = replace(budget, lut=10**7, ff=10**7, dsp=10**5, bram36=10**5)
    return best(designs(spec, budget))


def register_values(design: Design, rng: np.random.Generator) -> list[int]:
    """One Index Register per class of row pattern: none, all, single rows, as many as cores and one more, every other
    row, and three random ones."""
    rows, cores = design.mlp.batch, design.mlp.cores
    everything = (1 << rows) - 1
    fixed = [0, everything, 1, 1 << (rows - 1), (1 << cores) - 1, (2 << cores) - 1, 0x55555555, 0xAAAAAAAA]
    drawn = [int(rng.integers(0, 1 << rows)) for _ in range(3)]
    return list(dict.fromkeys(value & everything for value in [*fixed, *drawn]))


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(COUNT))
def test_a_random_configuration_is_bit_exact(csim_tools: None, number: int, tmp_path: Path) -> None:
    """Outputs for every class of row pattern."""
    made, rng = random_design(number), np.random.default_rng(number)
    library, spec = Simulation.build(made, tmp_path / "hls", tmp_path / "build"), made.mlp
    layer = random_layer(spec, rng)
    stream = pack_mlp(layer, made)
    x, cached = ((rng.normal(size=(spec.batch, spec.hidden)) * 3).astype(np.float32) for _ in range(2))
    want = reference(x, layer, spec)
    for register in register_values(made, rng):
        computes = np.array([register >> b & 1 for b in range(spec.batch)], bool)
        assert_same_bits(library.mlp(x, register, cached, stream), np.where(computes[:, None], want, cached))
