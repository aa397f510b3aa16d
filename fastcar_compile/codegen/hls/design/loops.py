"""The loops of the array's processes: how often each iterates, and how long its pipeline is.

The closed form (`product_cycles`) and the cycle model use the same loops; those of the controller are in `controller.py`.
All intervals here are one clock (tests/hls/test_recurrences.py). Depths are estimates: the sum of the stages on the longest path, by the operators' names in published reports of
Vitis HLS for UltraScale+ at 250 to 300 MHz.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from fastcar_compile.artifact.engine import PRODUCTS_PER_SUM, EngineProduct, float_words
from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD, MAX_ROWS

# A loop keeps an interval of one clock when what an iteration reads of an earlier one was written by then. The sources
# declare such distances with FASTCAR_RECURRENCE; tests/hls/test_recurrences.py compares them with these latencies.


ADD_CLOCKS = 6
"""Latency of a float32 addition below 275 MHz on UltraScale+: Vitis HLS takes `fadd_32ns_32ns_32_7_full_dsp_1`, seven stages,
"LATENCY 6" in the scripts that it writes for published designs on Alveo U50."""

FAST_ADD_CLOCKS, FAST_MHZ = 10, 275.0
"""From 275 MHz on up to 300 MHz: adders of latency 7 are reported there, and three clocks more let a memory have an output register
and a multiplexer."""

ADD_CLOCKS_MOST = 11
"""PG060: the most stages of the single-precision adder with full DSP usage; above 300 MHz nothing less is known."""

MOST_KNOWN_MHZ = 300.0

MEMORY_CLOCKS = 2
"""A sum in a memory: one clock to read it, one to write it."""


def total_latency(clock_mhz: float) -> int:
    """Return the clocks in which a float32 total in a memory is read, added to and written."""
    fast = FAST_ADD_CLOCKS if clock_mhz <= MOST_KNOWN_MHZ else ADD_CLOCKS_MOST
    return MEMORY_CLOCKS + (ADD_CLOCKS if clock_mhz < FAST_MHZ else fast)


def scale_rows(port_blocks: int, clock_mhz: float) -> int:
    """Return the least rows that a tile takes in the loop over groups: a total rests until it is written."""
    # A total is met again after all port blocks of all rows of the tile.
    return ceil(total_latency(clock_mhz) / port_blocks)


READ, WRITE, COMPARE, INTEGER = 2, 1, 2, 1
"""Stages: of a block RAM's read and write, a float comparison, and an integer addition."""

MULTIPLY, TO_FLOAT, TO_INTEGER = 3, 5, 4
"""Stages of fmul (`fmul_32ns_32ns_32_4_max_dsp_1`: latency 3), sitofp (`..._6_...`) and fptosi."""

CASCADE = 11
"""Stages of eight multiply-adds in a row: three of a DSP48E2 and one per further slice (UG579)."""

DIVIDE = 16
"""Stages of fdiv (`fdiv_32ns_32ns_32_16_no_dsp_1`)."""

FETCH_DEPTH = 1 + WRITE
SPLIT, ACCUMULATE = INTEGER, INTEGER
INT8_SCALE_DEPTH = READ + TO_FLOAT + MULTIPLY + ADD_CLOCKS + WRITE
INT4_SCALE_DEPTH = INT8_SCALE_DEPTH + ADD_CLOCKS + MULTIPLY
"""Of w8a8 the scales are multiplied beside the conversion; w4a8 adds a part to a total, which the row's scale multiplies."""

ROUND_DEPTH = TO_INTEGER + TO_FLOAT + ADD_CLOCKS + COMPARE + INTEGER
ACTIVATION_DEPTH = 2 * COMPARE + MULTIPLY + ROUND_DEPTH + READ + CASCADE // 2 + TO_FLOAT + 2 * MULTIPLY
FINISH_DEPTH = READ + ACTIVATION_DEPTH + MULTIPLY + WRITE
SEND_DEPTH = READ + WRITE
AMAX_DEPTH = READ + 3 * INTEGER
STREAM_DEPTH = 2
"""Clocks in which a word passes through a loop that only moves it. Estimate."""

QUANTIZE_DEPTH = READ + MULTIPLY + 2 * COMPARE + ROUND_DEPTH + WRITE
SUBTRACT_DEPTH = READ + MULTIPLY + ADD_CLOCKS + WRITE
DRAFT_INTERVAL = 4
"""Clocks for a word in the loops of a draft besides its products: one operator takes the four values in turn."""


@dataclass(frozen=True)
class Loop:
    """One pipelined loop.

    Args:
        process: function in the sources. label: of the loop there.
        trips: iterations. depth: clocks from the start of an iteration to its end, the first not counted.
        interval: clocks from one iteration to the next.
        moves: whether every iteration moves a 128-bit word over an AXI port, so that the first waits for the memory.
    """

    process: str
    label: str
    trips: int
    depth: int
    interval: int = 1
    moves: bool = False

    @property
    def clocks(self) -> int:
        """Clocks that all iterations take where others follow at once."""
        return self.interval * self.trips

    @property
    def cycles(self) -> int:
        """Clocks from the first iteration's start to the last one's end, without the memory; 0 without an iteration."""
        return self.interval * (self.trips - 1) + 1 + self.depth if self.trips else 0


@dataclass(frozen=True)
class LoadLoop:
    """What the array has to do in a call.

    Args:
        rows: that compute. passes: of the busiest core. cores: that work in lock step.
        scale_rows: least rows of a tile in the loop over groups (`scale_rows`).
        bypasses: values that no activation takes pass by its stages. In RTL they do; a loop of HLS has one depth.
    """

    rows: int
    passes: int
    cores: int
    scale_rows: int
    bypasses: bool = False


@dataclass(frozen=True)
class TileLoops:
    """The five processes of one tile; each is a stage of the DATAFLOW loop over tiles."""

    fetch: Loop
    multiply: Loop
    scale: Loop
    finish: Loop
    send: Loop

    @property
    def stages(self) -> tuple[Loop, ...]:
        """In the order of the sources."""
        return self.fetch, self.multiply, self.scale, self.finish, self.send


def tile_loops(product: EngineProduct, load: LoadLoop, *, inner: bool = False) -> TileLoops:
    """Return the loops of one tile of a product.

    Args:
        inner: its values stay in the cores, as those of an MLP's first product.
    """
    channels = product.tile * product.ports
    # Short tiles have empty turns: a float32 total may be read again only after the adder has written it.
    turns = product.tile if product.sums == 1 else max(product.tile, load.scale_rows)
    scaled = load.passes * product.sums * turns * product.port_blocks
    sent = 0 if inner else load.rows * channels // FLOATS_PER_WORD
    finish = FINISH_DEPTH - (ACTIVATION_DEPTH if load.bypasses and not inner else 0)
    return TileLoops(
        Loop("fetch_tile", "words", product.head_words + product.tile_words, FETCH_DEPTH),
        Loop("mac_tile", "words", load.passes * product.tile_words, mac_depth(product.lanes)),
        Loop("scale_tile", "groups", scaled, INT8_SCALE_DEPTH if product.bits == 8 else INT4_SCALE_DEPTH),
        Loop("finish_tile", "channels", load.passes * channels, finish),
        Loop("send_tile", "words", sent, SEND_DEPTH * load.rows),
    )


def mac_depth(lanes: int) -> int:
    """Return the depth of the loop over words: a cascade for eight lanes of a word, and a tree over their sums."""
    tree = INTEGER * ceil(log2(lanes / PRODUCTS_PER_SUM))
    return READ + CASCADE + SPLIT + tree + ACCUMULATE + WRITE


def places_loop() -> Loop:
    """Return the loop that finds which places of the array are occupied, before it loads rows."""
    return Loop("compute", "places", MAX_ROWS, READ + INTEGER)


def load_loop(inputs: int, load: LoadLoop) -> Loop:
    """Return the loop that moves the rows of x into the cores, a word per clock."""
    return Loop("load_rows", "words", load.rows * float_words(inputs), SEND_DEPTH * load.rows)


def quantize_loops(product: EngineProduct, load: LoadLoop) -> tuple[Loop, ...]:
    """Return the loops that quantise the rows before a product, pass by pass."""
    padded = product.channel_words * product.lanes // FLOATS_PER_WORD
    once = (
        Loop("quantize_rows", "sizes", float_words(product.inputs), AMAX_DEPTH),
        Loop("quantize_rows", "scales", load.cores, DIVIDE + WRITE),
        Loop("quantize_rows", "values", padded, QUANTIZE_DEPTH),
    )
    return once * load.passes


def subtract_loops(features: int, rows: int) -> tuple[Loop, ...]:
    """Return the loops that take the features of the recalled rows from those of so many rows of a draft."""
    own = Loop("subtract_recalled", "subtract_values", float_words(features), SUBTRACT_DEPTH, DRAFT_INTERVAL)
    return (own,) * rows


def tail_cycles(product: EngineProduct, load: LoadLoop) -> int:
    """Return the clocks from the last word of a product to its last result: a tile passes the stages behind the first."""
    return sum(loop.cycles for loop in tile_loops(product, load).stages[1:])


@lru_cache(maxsize=65536)
def product_cycles(product: EngineProduct, load: LoadLoop, *, inner: bool = False) -> int:
    """Return the clocks of one product: quantisation, then the tiles, which overlap at the pace of the slowest stage."""
    stages = [loop.cycles for loop in tile_loops(product, load, inner=inner).stages]
    edges = sum(loop.cycles for loop in quantize_loops(product, load))
    # The first tile passes through all stages. Each further one adds the slowest stage alone.
    return edges + (product.tiles - 1) * max(stages) + sum(stages)
