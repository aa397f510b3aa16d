"""Resources of the engine. All of them are estimates of this project, not synthesis results.

A BRAM36 is counted by its simple dual port shapes (UG573): 512 x 72, 1024 x 36, 2048 x 18, 4096 x 9; an URAM as 4096 x 72.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil

from fastcar_compile.artifact.sections.accelerator import UsagePart
from fastcar_compile.codegen.hls.design.product import FLOATS_PER_WORD, WORD_BITS, float_words, row_lanes
from fastcar_compile.codegen.hls.design.spec import BoardBudget, MlpSpec

ROW_PORTS = 2
"""AXI ports besides the weights: one reads x, one reads the cached rows and writes y."""

FACTOR_ROM = (1, 32, 513)
"""Copies, bits and depth of the activation's table, one per core."""

FIFO_WORDS = 512
"""Words that each weight port's FIFO holds (FASTCAR_FIFO(ports, 512))."""

BRAM_SHAPES = ((72, 512), (36, 1024), (18, 2048), (9, 4096))
LUT_RAM_DEPTH = 64
"""Memories this shallow go to LUTs: 64 bits each."""

LANE_LUT, LANE_FF = 30, 45
"""One int8 multiply-accumulate lane around its DSP: its share of the adder tree and the pipeline. Estimate."""

FLOAT_MULTIPLY_DSP, FLOAT_ADD_DSP = 3, 2
"""DSP48E2 of a float32 operator at the usage that Vitis HLS takes by default (PG060, "full" multiplier and adder)."""

FLOAT_LUT, FLOAT_FF = 350, 550
"""Fabric around one float32 operator. Estimate."""

CORE_LUT, CORE_FF = 3_000, 3_500
"""One core besides its lanes and float32 operators: two dividers' control, converters, addresses. Estimate."""

PORT_LUT, PORT_FF, PORT_BRAM = 2_500, 3_500, 4
"""One 128-bit AXI master. Its buffer holds what is in flight: 16 KiB are four blocks of 72 x 512 bits."""

BASE_LUT, BASE_FF, BASE_BRAM = 6_000, 7_000, 4
"""DRS controller, AXI-Lite control and the row processes. Estimate."""

CONTROL_LUT, CONTROL_FF, CONTROL_DSP = 1_500, 1_500, 6
"""Loop bounds at run time: the products of small integers in every process of one core, and of the top. Estimate."""


@dataclass(frozen=True)
class Usage:
    """Counts of LUT, FF, DSP slices, BRAM36 and URAM blocks."""

    lut: int
    ff: int
    dsp: int
    bram36: int
    uram: int = 0

    @property
    def part(self) -> UsagePart:
        """The counts for the manifest."""
        return UsagePart(**asdict(self))

    def over(self, budget: BoardBudget) -> list[str]:
        """Return one text per resource whose use is above the budget."""
        pairs = {name: (used, getattr(budget, name)) for name, used in vars(self).items()}
        return [f"{name.upper()} {used} of {limit}" for name, (used, limit) in pairs.items() if used > limit]


@dataclass(frozen=True)
class Buffers:
    """Sizes of one core's buffers, those of the largest product.

    Args:
        inputs: floats of a row. tile, tile_words, tile_sums, head_words: of a tile on one port.
        channel_words: of one channel's weights. prefetch_words: of the prefetch buffer on one port, for all cores.
        uram: whether tiles and prefetch buffer are in UltraRAM.
    """

    inputs: int
    tile: int
    tile_words: int
    tile_sums: int
    head_words: int
    channel_words: int
    prefetch_words: int
    uram: bool


def bram_blocks(bits: int, depth: int) -> int:
    """Return the BRAM36 blocks of a memory of `depth` words of `bits` bits; 0 when it goes to LUTs."""
    if depth <= LUT_RAM_DEPTH:
        return 0
    return min(ceil(bits / width) * ceil(depth / height) for width, height in BRAM_SHAPES)


def uram_blocks(bits: int, depth: int) -> int:
    """Return the URAM blocks of a memory of `depth` words of `bits` bits."""
    return ceil(bits / 72) * ceil(depth / 4096)


def lut_ram(bits: int, depth: int) -> int:
    """Return the LUTs of a memory that is too shallow for block RAM, else 0."""
    return bits if depth <= LUT_RAM_DEPTH else 0


def engine_usage(mlp: MlpSpec, ports: int, buffers: Buffers) -> Usage:
    """Return the resources of an engine: its lanes, cores, AXI ports and buffers."""
    rows = ceil(mlp.batch / mlp.cores)
    word_lanes, axi = WORD_BITS // mlp.weight_bits, ports + ROW_PORTS
    lanes = mlp.cores * ports * word_lanes * rows
    tile, memories = (2 * ports, WORD_BITS, buffers.tile_words), _memories(mlp, ports, rows, buffers)
    memories += [] if buffers.uram else [tile]
    multiplies, adds = _float_operators(mlp, ports, rows)
    core_dsp = multiplies * FLOAT_MULTIPLY_DSP + adds * FLOAT_ADD_DSP + CONTROL_DSP
    core_dsp += 0 if mlp.activation == "relu" else 2  # the table's blend: two products in integers
    core_lut = CORE_LUT + CONTROL_LUT + sum(n * lut_ram(bits, depth) for n, bits, depth in memories)
    core_lut += (multiplies + adds) * FLOAT_LUT
    core_ff = CORE_FF + CONTROL_FF + (multiplies + adds) * FLOAT_FF
    core_bram = sum(n * bram_blocks(bits, depth) for n, bits, depth in memories)
    prefetch_bram, prefetch_uram = prefetch_blocks(ports, buffers.prefetch_words, uram=buffers.uram)
    core_uram = tile[0] * uram_blocks(*tile[1:]) if buffers.uram else 0
    return Usage(
        lut=lanes * LANE_LUT + mlp.cores * core_lut + axi * PORT_LUT + BASE_LUT + CONTROL_LUT,
        ff=lanes * LANE_FF + mlp.cores * core_ff + axi * PORT_FF + BASE_FF + CONTROL_FF,
        dsp=mlp.cores * (word_lanes * multipliers(rows, ports) + core_dsp) + CONTROL_DSP,
        bram36=mlp.cores * core_bram
        + axi * PORT_BRAM
        + ports * bram_blocks(WORD_BITS, FIFO_WORDS)
        + BASE_BRAM
        + prefetch_bram,
        uram=mlp.cores * core_uram + prefetch_uram,
    )


def prefetch_blocks(ports: int, words: int, *, uram: bool) -> tuple[int, int]:
    """Return (BRAM36, URAM) blocks of a prefetch buffer of `words` words on each port."""
    if not words:
        return 0, 0
    return (0, ports * uram_blocks(WORD_BITS, words)) if uram else (ports * bram_blocks(WORD_BITS, words), 0)


def multipliers(rows: int, ports: int) -> int:
    """Return the DSP slices per lane of a word in one core: two products share one (fastcar_mac.hpp; AMD WP486)."""
    return ceil(rows * ports / 2)


def _float_operators(mlp: MlpSpec, ports: int, rows: int) -> tuple[int, int]:
    """Return (multipliers, adders) of float32 in one core, counted in the sources."""
    table = mlp.activation != "relu"
    activate = (3 if table else 0) + (1 if mlp.gated else 0)
    groups = ports * row_lanes(rows)
    scale = (2, 0) if mlp.weight_bits == 8 else (groups + 1, groups)
    # x * inverse and the rest of its rounding, four values at a time; the row's scale; a bias.
    return FLOATS_PER_WORD + 1 + activate + scale[0], FLOATS_PER_WORD + int(table) + 1 + scale[1]


def _memories(mlp: MlpSpec, ports: int, rows: int, buffers: Buffers) -> list[tuple[int, int, int]]:
    """Return (copies, bits, depth) of one core's buffers but its tiles.

    Sums, values and results are there twice, heads three times, rows and group totals once.
    """
    return [
        (3 * ports, WORD_BITS, buffers.head_words),
        (2 * ports * rows, 32, buffers.tile_sums),
        (2 * ports * rows, 32, buffers.tile),
        (2, WORD_BITS, rows * float_words(buffers.tile * ports)),
        (rows, 8 * WORD_BITS // mlp.weight_bits, buffers.channel_words),
        (FLOATS_PER_WORD, 32, rows * float_words(buffers.inputs)),
        *([] if mlp.weight_bits == 8 else [(ports * rows, 32, buffers.tile)]),
        *([] if mlp.activation == "relu" else [FACTOR_ROM]),
    ]
