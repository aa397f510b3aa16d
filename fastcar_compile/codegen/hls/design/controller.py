"""Clocks and resources of the TAS unit and DRS controller. Estimates of this project, not synthesis results."""

from __future__ import annotations

from fastcar_compile.codegen.hls.design.usage import Usage, bram_blocks
from fastcar_compile.drs.table import (
    FLOATS_PER_WORD,
    HEADER_WORDS,
    MAX_LAYER_WORDS,
    MAX_ROWS,
    DrsTable,
    Limits,
    table_words,
)

PRODUCT_DSP = 2
"""24 by 24 bits unsigned in the 27 x 18 multipliers of a DSP48E2 (UG579): two of them."""

SCORE_DSP = 3
"""One float32 multiplication per row (as in FLOAT_MULTIPLY_DSP of usage.py)."""

PRODUCT_LUT, PRODUCT_FF = 350, 400
"""The shifter, rounding and limit of one product, and its share of the adder. Estimate."""

CONTROL_LUT, CONTROL_FF = 2_500, 3_000
"""Checks, CRC-32 of a word per clock, gate, mapping and dispatch. Estimate."""


def controller_cycles(table: DrsTable, records: int = 0) -> int:
    """Return the clocks of one call for a layer with a gate, from the loops of fastcar_drs.hpp; memory latency is left out.

    Args:
        records: that are dispatched; 0: all that a layer without replay has.
    """
    shape, rows, stride = table.attention, table.rows, len(table.instructions[0])
    words = table_words(table.layers, rows)
    scores = rows * (shape.query_words + shape.key_words)
    return HEADER_WORDS + words - 3 + stride + 3 * rows + scores + MAX_ROWS + 2 * (records or rows + 2)


def controller_usage(limits: Limits) -> Usage:
    """Return the resources besides the AXI ports."""
    lanes = FLOATS_PER_WORD
    return Usage(
        lut=CONTROL_LUT + lanes * PRODUCT_LUT,
        ff=CONTROL_FF + lanes * PRODUCT_FF,
        dsp=lanes * PRODUCT_DSP + SCORE_DSP,
        bram36=bram_blocks(128, limits.key_words) + bram_blocks(32, MAX_LAYER_WORDS),
    )
