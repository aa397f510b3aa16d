"""Resources of the engine. Those of the MAC array and of FIFOs are measured: yosys counts their RTL (`make resources`), and
rtl_resources.toml has the figures. All others are estimates of this project, not measured.

Block RAM is counted in halves of a BRAM36, by their simple dual port shapes (UG573): 512 x 36, 1024 x 18, 2048 x 9; an URAM as
4096 x 72.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from math import ceil, log2

from fastcar_compile.artifact.engine import (
    FLOATS_PER_WORD,
    PRODUCTS_PER_SUM,
    WORD_BITS,
    WORD_BYTES,
    EngineProduct,
    MlpSpec,
    Usage,
    float_words,
)
from fastcar_compile.codegen.hls.design.spec import TABLED

ROW_PORTS = 2
"""AXI ports besides the weights: one reads x, one reads the cached rows and writes y."""

FACTOR_ROM = (32, 513)
"""Bits and depth of the activation's table; one per core."""

FIFO_WORDS = 512
"""128-bit words that each weight port's FIFO holds."""

STEP_FIFO_WORDS = 2048
"""The same in a kernel of whole steps, and in RTL. With the requests under way it holds what a port streams while a row of 4,096 values is
loaded and quantised, 3 x 1,024 clocks."""

URAM_WORDS = 4096
"""Words of an UltraRAM: the FIFOs of such a kernel hold as many where they are in UltraRAM."""

HALF_SHAPES = ((36, 512), (18, 1024), (9, 2048))
LUT_RAM_DEPTH = 64
"""Memories this shallow go to LUTs: 64 bits each. Eight LUTs are 14 bits of 32 words (UG574, RAM32M16 with a read and a write port)."""

SPLIT_BITS, SUM_BITS = 18, 32
"""Adders around the DSP slices, by the widths in fastcar_mac_array.sv: the high sum without its borrow, and an accumulator. Between
them is the sum of a word's parts. One LUT per bit (UG574: a CARRY8 chain takes eight LUTs for eight bits);
sums of eight products stay in the DSP's own adders, over the cascade (UG579)."""

SKEWED = 5
"""Lanes of eight whose operands wait three clocks or more for their turn in the cascade: a shift register in a LUT per bit."""

STAGES = 2
"""Flip-flops per such LUT: registers before and behind an adder. Estimate; of the array yosys counts 1.0 to 1.5."""


def measured(unit: str) -> Usage:
    """Return LUTs and flip-flops that yosys counts of a unit of the RTL."""
    table = tomllib.loads((files("fastcar_compile.codegen.hls.design") / "rtl_resources.toml").read_text())
    return Usage(table[unit]["lut"], table[unit]["ff"])


STREAM = measured("fifo")
"""A FIFO of sixteen 128-bit words. Measured."""

FLOAT_MULTIPLY, FLOAT_ADD = Usage(150, 250, dsp=3), Usage(350, 550, dsp=2)
"""A float32 operator of Vitis HLS: DSP48E2 at the usage that it takes by default (PG060, "full" multiplier and adder), and the
fabric around it. Estimate of the fabric: the mantissas of a product are in its DSPs, which leaves exponents and rounding; an adder
shifts besides. Of operators without subnormal numbers yosys counts less (tests/rtl/test_resources.py). Those of the RTL are other units:
they keep subnormal numbers, multiply with two DSP48E2 and 434 LUT, and add with 497 LUT and none."""

CORE = Usage(lut=800, ff=1_000)
"""One core besides its sums and float32 operators: converters and the multiplexers of its row. Estimate."""

ARRAY = Usage(lut=3_000, ff=3_500)
"""The array besides its cores: the divider, counters and addresses of every loop. Estimate."""

PORT = Usage(lut=1_700, ff=2_000)
"""One AXI master besides its buffers. Estimate: the largest of five masters of Vitis HLS that Vivado counted after synthesis in one
design (602 to 1,632 LUT, 857 to 1,934 FF); the read half in RTL takes 349 LUT and 219 FF."""

LONGEST_BURST = 256
"""Beats of an AXI4 burst."""


@dataclass(frozen=True)
class Bursts:
    """Requests that an AXI master has under way in one direction. The master has a buffer for all their data (UG1399).

    Args:
        length: bytes of one burst. outstanding: bursts under way. strobes: whether every byte has a strobe.
    """

    length: int
    outstanding: int
    strobes: bool = False

    def beats(self, beat: int) -> int:
        """Return the beats of a burst on a port of `beat` bytes."""
        return min(self.length // beat, LONGEST_BURST)

    def blocks(self, beat: int, masters: int = 1) -> int:
        """Return the BRAM36 of the buffers of `masters` ports of `beat` bytes.

        Vitis HLS binds these buffers to block RAM, whatever their depth (UG1399, m_axi_buffer_impl).
        """
        # Every byte of a write beat has a strobe bit in the buffer.
        bits = 8 * beat + (beat if self.strobes else 0)
        # Two halves of a BRAM36 are independent, so the ports' odd halves are paired.
        return ceil(masters * _block_halves(bits, self.beats(beat) * self.outstanding) / 2)


READS = Bursts(length=4096, outstanding=4)
"""No AXI burst crosses 4 KiB. 16 KiB in flight hide the latency of a memory."""

WRITES = Bursts(length=1024, outstanding=8, strobes=True)
"""8 KiB in flight are 512 beats of 128 bits: the depth of a block RAM at its full width, so that fewer cost as much."""

BASE = Usage(lut=2_000, ff=2_500, bram36=4)
"""AXI-Lite control, the row processes and handshakes; the controller is counted apart. Estimate: in RTL they take
1,464 LUT and 1,551 FF, with 16 addresses."""

CONTROL = Usage(lut=1_500, ff=1_500, dsp=12)
"""Loop bounds of a linear at run time, once per call: the products of small integers in decode and run_product. Estimate."""


@dataclass(frozen=True)
class Buffers:
    """Sizes of the buffers, those of the largest product.

    Args:
        rows: that the array holds. inputs: floats of a row, and its int8 values. tile: rows of a tile on one port. tile_words: of their weights.
        tile_sums: int32 sums of a tile on one port. sums: of one channel.
        head_words: of a tile's scales and biases on one port. channel_words: of one channel's weights.
        uram: whether tiles are in UltraRAM. values_uram: whether rows and neurons are, before they are quantised.
    """

    rows: int
    inputs: int
    tile: int
    tile_words: int
    tile_sums: int
    sums: int
    head_words: int
    channel_words: int
    uram: bool
    values_uram: bool


def _block_halves(bits: int, depth: int) -> int:
    # The shape that needs the fewest blocks is taken; a wide memory is cut into columns, a deep one into rows.
    return min(ceil(bits / width) * ceil(depth / height) for width, height in HALF_SHAPES)


def bram_blocks(bits: int, depth: int, copies: int = 1) -> int:
    """Return the BRAM36 of so many memories of `depth` words of `bits` bits; 0 when they go to LUTs."""
    # Copies share blocks by halves: only the total is rounded up.
    return 0 if depth <= LUT_RAM_DEPTH else ceil(copies * _block_halves(bits, depth) / 2)


def memory(bits: int, depth: int, copies: int = 1, *, uram: bool = False) -> Usage:
    """Return the blocks of so many such memories; the LUTs of those that are too shallow for block RAM."""
    if uram:
        # An UltraRAM block has one shape, 4096 x 72, so a shallow memory wastes most of it.
        return Usage(uram=copies * ceil(bits / 72) * ceil(depth / URAM_WORDS))
    luts = 0 if depth > LUT_RAM_DEPTH else copies * bits if depth > 32 else ceil(copies * bits * 8 / 14)
    return Usage(lut=luts, bram36=bram_blocks(bits, depth, copies))


def engine_usage(mlp: MlpSpec, product: EngineProduct, axi_words: int, buffers: Buffers, fifo_words: int) -> Usage:
    """Return the resources of an engine: its array, AXI ports and buffers.

    Args:
        product: any of the design's, for its ports and bits. fifo_words: of every weight port's FIFO.
    """
    ports, cores, axi = product.ports, mlp.cores, product.ports // axi_words
    multiplied, added = _float_operators(mlp, product)
    blend = int(mlp.activation in TABLED)  # between the table's knots: a product in integers
    # A block of four ports meets its scaler over one LUT6 per bit (UG574): sums of every core, and words of the head.
    select = product.port_lanes * (cores * SUM_BITS + WORD_BITS)
    around = sum(adders(cores, ports, product.lanes)) + select
    bursts = READS.blocks(axi_words * WORD_BYTES, axi) + READS.blocks(WORD_BYTES, ROW_PORTS) + WRITES.blocks(WORD_BYTES)
    fixed = Usage(around, STAGES * around, product.lanes * multipliers(cores, ports) + cores * blend, bursts)
    array = FLOAT_MULTIPLY * multiplied + FLOAT_ADD * added + CORE * cores + ARRAY + CONTROL + BASE
    return (
        fixed
        + array
        + PORT * (axi + ROW_PORTS)
        + STREAM * ports
        + _memories(mlp, product, axi_words, buffers, fifo_words)
    )


def multipliers(rows: int, ports: int) -> int:
    """Return the DSP slices per lane of a word: two products share one (fastcar_mac.hpp; AMD WP486)."""
    return ceil(rows * ports / 2)


def adders(cores: int, ports: int, lanes: int) -> tuple[int, int]:
    """Return the LUTs around the multipliers: of the adders behind them, and of packing and skew before them.

    tests/rtl/test_resources.py holds their sum against the array's RTL.
    """
    parts, bits = lanes // PRODUCTS_PER_SUM, WORD_BITS // lanes
    pair = parts * SPLIT_BITS + 2 * (parts - 1) * (SPLIT_BITS + ceil(log2(parts))) + 2 * SUM_BITS
    # A pair of rows is packed once for all ports. An odd row packs the weights of two ports instead. Its borrow meets half of the
    # bits of the high operand: yosys makes wires of the others.
    packed = (cores // 2) * 4 + (cores % 2) * (ports // 2) * bits // 2
    skew = (ports * bits + cores * 8) * SKEWED // PRODUCTS_PER_SUM
    return multipliers(cores, ports) * pair, lanes * (packed + skew)


def _float_operators(mlp: MlpSpec, product: EngineProduct) -> tuple[int, int]:
    """Return the float32 multipliers and adders, counted in the sources."""
    table = mlp.activation in TABLED
    # Per core: x * inverse and the rest of its rounding, four values at a time; scaling; the activation.
    activate = (3 if table else 0) + int(mlp.activation == "relu2") + (1 if mlp.gated else 0)
    groups = 1 if product.bits == 4 else 0
    multiply = FLOATS_PER_WORD + 2 * product.port_lanes + activate
    add = FLOATS_PER_WORD + (1 + groups) * product.port_lanes + int(table)
    return mlp.cores * multiply + 1, mlp.cores * add  # and one for the rows' scales


def _memories(mlp: MlpSpec, product: EngineProduct, axi_words: int, buffers: Buffers, fifo_words: int) -> Usage:
    """Return the blocks of every buffer.

    The cores share tiles and heads. Tiles, sums, values and results are there twice, heads three times, the rest once.
    """
    ports, cores, passes = product.ports, mlp.cores, ceil(buffers.rows / mlp.cores)
    lanes, places = product.port_lanes, buffers.tile * product.port_blocks
    copies_bits_depth = [
        (3 * ports, WORD_BITS, buffers.head_words),
        (2 * ports * cores, 32, passes * buffers.tile_sums),
        (2 * lanes * cores, 32, passes * places),
        (0 if product.bits == 8 else lanes * cores, 32, places),
        (2 * cores, WORD_BITS, passes * float_words(buffers.tile * ports)),
        (cores, 8 * product.lanes, passes * buffers.channel_words),
        (ports // axi_words, axi_words * WORD_BITS, fifo_words // axi_words),
        (cores if mlp.activation in TABLED else 0, *FACTOR_ROM),
    ]
    # Tiles are double-buffered: one is fetched while the other is multiplied.
    tiles = memory(WORD_BITS, buffers.tile_words, 2 * ports, uram=buffers.uram)
    values = memory(32, passes * float_words(buffers.inputs), FLOATS_PER_WORD * cores, uram=buffers.values_uram)
    return sum((memory(bits, depth, copies) for copies, bits, depth in copies_bits_depth), start=tiles + values)
