"""Counted work of the engine: DRS against static mapping, where only the mapping function differs."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fastcar_compile.codegen.hls.design.product import float_words
from fastcar_compile.codegen.hls.packing import pack_mlp
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.runtime.backends.hls_csim import open_library
from hls.library import Array, assert_same_bits, design, random_layer
from hls.simulation import Simulation
from hls.sources import folder_sources

COUNTERS = "FASTCAR_COUNTERS"
"""The macro that counts."""

STATIC_MAPPING = "FASTCAR_STATIC_MAPPING"
"""The macro that maps row b to core b mod C, for comparison with DRS."""


@dataclass(frozen=True)
class Work:
    """The work that the engine executed.

    Attributes:
        mac: iterations of the MAC array, one word of every weight port each.
        weight_beats: beats of all AXI ports that read weights.
        row_beats: 128-bit words of rows that are read from memory and written there.
    """

    mac: int
    weight_beats: int
    row_beats: int


def read_counters(library: ctypes.CDLL) -> Work:
    """The work since the last call of this function."""
    counts = (ctypes.c_uint64 * 3)()
    library.fastcar_csim_counters(counts)
    return Work(*counts)


BATCH, CORES, REPLAY, FORWARDS = 32, 8, 0.8, 400
MADE = design(20, 24, BATCH, CORES, quant="w4a8")


class Mapping:
    """One build of the engine, and the library that counts its work."""

    def __init__(self, folder: Path, *defines: str) -> None:
        self.library = open_library(folder_sources(folder), folder / "build", (COUNTERS, *defines))
        self.engine = Simulation(self.library, MADE)

    def work(self, registers: list[int], x: Array, stream: Array) -> tuple[Array, Work]:
        """Outputs of the last MLP, and the work of all of them."""
        read_counters(self.library)
        rows = [self.engine.mlp(x, register, np.zeros_like(x), stream) for register in registers]
        return rows[-1], read_counters(self.library)


@pytest.fixture(scope="module")
def mappings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping, Mapping]:
    """DRS, then static mapping."""
    folder = tmp_path_factory.mktemp("work")
    emit_hls(MADE, folder)
    return Mapping(folder), Mapping(folder, STATIC_MAPPING)


@pytest.fixture(scope="module")
def inputs() -> tuple[Array, Array]:
    """Rows and a weight stream."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH, 20)).astype(np.float32), pack_mlp(random_layer(MADE.mlp, rng), MADE)


def independent(rng: np.random.Generator) -> list[int]:
    """Index Registers of rows that decide each on its own."""
    return [sum(1 << row for row in range(BATCH) if rng.random() >= REPLAY) for _ in range(FORWARDS)]


def correlated(rng: np.random.Generator) -> list[int]:
    """Index Registers of rows that all decide alike."""
    return [0 if rng.random() < REPLAY else (1 << BATCH) - 1 for _ in range(FORWARDS)]


def tile_words() -> int:
    """Iterations of the MAC array in one pass over an MLP."""
    return sum(p.tiles * p.tile_words for p in (MADE.gate_up, MADE.down))


def test_drs_saves_passes_of_independent_rows(
    csim_tools: None, mappings: tuple[Mapping, Mapping], inputs: tuple[Array, Array]
) -> None:
    """At replay 0.8, 32 rows on 8 cores; both give the same bits from the same weights."""
    registers = independent(np.random.default_rng(8))
    (y, drs), (other, static) = (mapping.work(registers, *inputs) for mapping in mappings)
    assert_same_bits(y, other)
    assert static.mac >= 1.6 * drs.mac
    passes = sum(-(-register.bit_count() // CORES) for register in registers)
    assert drs.mac == passes * tile_words()
    busiest = sum(max((register >> core & 0x01010101).bit_count() for core in range(CORES)) for register in registers)
    assert static.mac == busiest * tile_words()
    assert static.weight_beats == drs.weight_beats == MADE.ports * MADE.port_words * sum(r != 0 for r in registers)


def test_rows_that_decide_alike_gain_nothing(
    csim_tools: None, mappings: tuple[Mapping, Mapping], inputs: tuple[Array, Array]
) -> None:
    registers = correlated(np.random.default_rng(8))
    (_, drs), (_, static) = (mapping.work(registers, *inputs) for mapping in mappings)
    assert drs == static
    computed = sum(register != 0 for register in registers)
    assert drs.mac == computed * BATCH // CORES * tile_words()
    words = float_words(MADE.mlp.hidden)
    assert drs.row_beats == computed * BATCH * 2 * words
