"""Random configurations of the engine without linears, bit for bit against numpy. FASTCAR_HLS_CONFIGS sets how many."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.spec import MAX_ROWS
from fastcar_compile.codegen.hls.packing import pack_mlp
from hls.configurations import KINDS, build_together, random_design, register_values
from hls.library import assert_same_bits, random_layer, reference
from hls.simulation import Simulation

COUNT = int(os.environ.get("FASTCAR_HLS_CONFIGS", "6"))
TOGETHER = 6


@pytest.fixture(scope="module")
def designs() -> list[Design]:
    """The first COUNT random designs."""
    return [random_design(number) for number in range(COUNT)]


def check(made: Design, library: Simulation, number: int) -> None:
    """Outputs for every class of row pattern."""
    spec, rng = made.mlp, np.random.default_rng(number)
    layer = random_layer(spec, rng)
    stream = pack_mlp(layer, made)
    x, cached = ((rng.normal(size=(spec.batch, spec.hidden)) * 3).astype(np.float32) for _ in range(2))
    want = reference(x, layer, spec)
    for register in register_values(made, rng):
        computes = np.array([register >> b & 1 for b in range(spec.batch)], bool)
        got = library.mlp(x, register, cached, stream)
        assert_same_bits(got, np.where(computes[:, None], want, cached))


@pytest.mark.thorough
@pytest.mark.timeout(120 + 20 * COUNT)
def test_random_configurations_are_bit_exact(csim_tools: None, designs: list[Design], tmp_path: Path) -> None:
    chunks = [designs[i : i + TOGETHER] for i in range(0, COUNT, TOGETHER)]

    def build(number: int) -> list[Simulation]:
        folder = tmp_path / f"chunk_{number}"
        folder.mkdir()
        return build_together(chunks[number], folder)

    with ThreadPoolExecutor(max_workers=2) as pool:
        libraries = [library for chunk in pool.map(build, range(len(chunks))) for library in chunk]
    for number, (made, library) in enumerate(zip(designs, libraries, strict=True)):
        check(made, library, number)


def test_the_draw_covers_the_family(designs: list[Design]) -> None:
    """From 24 on: every kind, narrow and wide batches, every number of ports, tails."""
    designs = designs + [random_design(number) for number in range(COUNT, 24)]
    specs = [d.mlp for d in designs]
    assert {(s.quant, s.gated, s.activation) for s in specs} == set(KINDS)
    assert {1, MAX_ROWS} <= {s.batch for s in specs}
    assert {d.axi_words for d in designs} == {1, 2, 4}
    assert {d.axi_weight_ports for d in designs} == {1, 2, 3, 4, 6, 8}
    assert {d.ports % 4 for d in designs} >= {0, 2, 3}
    assert {(s.up_bias, s.down_bias) for s in specs} == {(a, b) for a in (False, True) for b in (False, True)}
    assert any(d.gate_up.tiles * d.gate_up.tile * d.ports > d.gate_up.channels for d in designs)
    assert any(d.gate_up.tiles > 1 for d in designs)
    assert {d.mlp.cores % 2 for d in designs} == {0, 1}
    assert min(d.passes for d in designs) == 1
    assert max(d.passes for d in designs) > 4
    assert any(s.hidden % 128 for s in specs if s.quant == "w4a8")
    assert any(s.intermediate % 16 for s in specs if s.quant == "w8a8")
