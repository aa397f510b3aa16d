"""Resource estimates. All of them are estimates of this project, not synthesis results.

A BRAM36 is counted by its simple dual port shapes (UG573): 512 x 72, 1024 x 36, 2048 x 18, 4096 x 9; an URAM as 4096 x 72.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

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


@dataclass(frozen=True)
class Usage:
    """Counts of LUT, FF, DSP slices, BRAM36 and URAM blocks."""

    lut: int
    ff: int
    dsp: int
    bram36: int
    uram: int = 0

    def over(self, lut: int, ff: int, dsp: int, bram36: int, uram: int) -> list[str]:
        """One text per resource whose use is above the limit given."""
        limits = {"lut": lut, "ff": ff, "dsp": dsp, "bram36": bram36, "uram": uram}
        used = {name: getattr(self, name) for name in limits}
        return [f"{name.upper()} {used[name]} of {limit}" for name, limit in limits.items() if used[name] > limit]


def bram_blocks(bits: int, depth: int) -> int:
    """BRAM36 blocks of a memory of `depth` words of `bits` bits; 0 when it goes to LUTs."""
    if depth <= LUT_RAM_DEPTH:
        return 0
    return min(ceil(bits / width) * ceil(depth / height) for width, height in BRAM_SHAPES)


def uram_blocks(bits: int, depth: int) -> int:
    """URAM blocks of a memory of `depth` words of `bits` bits."""
    return ceil(bits / 72) * ceil(depth / 4096)


def lut_ram(bits: int, depth: int) -> int:
    """LUTs of a memory that is too shallow for block RAM, else 0."""
    return bits if depth <= LUT_RAM_DEPTH else 0
