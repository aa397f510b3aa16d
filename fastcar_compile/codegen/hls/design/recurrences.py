"""Recurrences of the kernels' pipelined loops: what an iteration needs of an earlier one, and how many clocks that takes.

A loop keeps an interval of one clock when every distance (iterations) is at least its latency (clocks). The sources declare
the distances with FASTCAR_RECURRENCE; tests/hls compares those with this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastcar_compile.codegen.hls.design.design import Design

ADD_CLOCKS = 6
"""Latency of a float32 addition up to 300 MHz on UltraScale+: Vitis HLS takes `fadd_32ns_32ns_32_7_full_dsp_1`, seven stages,
"LATENCY 6" in the scripts that it writes for published designs on Alveo U50."""

ADD_CLOCKS_MOST = 11
"""PG060: the most stages of the single-precision adder with full DSP usage; above 300 MHz nothing less is known."""

MOST_KNOWN_MHZ = 300.0

MEMORY_CLOCKS = 2
"""A sum in a memory: one clock to read it, one to write it."""

REGISTER_CLOCKS = 1
"""An integer addition, a comparison or a copy in registers."""


@dataclass(frozen=True)
class Recurrence:
    """What one loop carries on.

    Args:
        loop: function and label in the sources. variable: that the loop carries.
        distance: iterations after which a value is read again, at least.
        latency: clocks from that read to the write that the next read needs.
    """

    loop: str
    variable: str
    distance: int
    latency: int

    @property
    def keeps_pace(self) -> bool:
        """Whether the loop can start an iteration every clock."""
        return self.distance >= self.latency


def total_latency(clock_mhz: float) -> int:
    """Return the clocks in which a float32 total in a memory is read, added to and written."""
    return MEMORY_CLOCKS + (ADD_CLOCKS if clock_mhz <= MOST_KNOWN_MHZ else ADD_CLOCKS_MOST)


def scale_rows(port_blocks: int, clock_mhz: float) -> int:
    """Return the least rows that a tile takes in the loop over groups: a total rests until it is written."""
    # A total is met again after all port blocks of all rows of the tile.
    return ceil(total_latency(clock_mhz) / port_blocks)


def recurrences(design: Design) -> list[Recurrence]:
    """Return every recurrence of the engine's loops for every product of the design; index counters are left out."""
    clock, found = design.budget.clock_mhz, []
    for product in design.products:
        # A single sum per channel is scaled once and carries no total.
        if product.sums > 1:
            rows = max(product.tile, design.scale_rows)
            found.append(Recurrence("scale_tile.groups", "total", rows * product.port_blocks, total_latency(clock)))
    registers = (
        ("mac_tile.words", "partial"),
        ("quantize_rows.sizes", "amax"),
        ("finish_tile.channels", "lanes"),
        ("finish_tile.channels", "previous"),
    )
    found += [Recurrence(loop, variable, 1, REGISTER_CLOCKS) for loop, variable in registers]
    return found


def step_recurrences(design: Design) -> list[Recurrence]:
    """Return those that a kernel of whole steps has besides the array's."""
    total = total_latency(design.budget.clock_mhz)
    return [
        Recurrence("add_values.add_sums", "total", total, total),
        Recurrence("multiply_blocks.multiply_words", "partial", 1, REGISTER_CLOCKS),
        Recurrence("multiply_blocks.multiply_words", "input", 2, MEMORY_CLOCKS),
        Recurrence("soften.keep_logits", "found", 1, REGISTER_CLOCKS),
        Recurrence("soften.add_numerators", "sum", 1, REGISTER_CLOCKS),
        Recurrence("weigh_values.scale_weights", "largest", 1, REGISTER_CLOCKS),
        Recurrence("append_value.write_values", "now", 1, REGISTER_CLOCKS),
    ]
