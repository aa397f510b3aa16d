"""Clocks and resources of the TAS unit and DRS controller. Estimates of this project, not synthesis results."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fastcar_compile.codegen.hls.design.usage import Usage, bram_blocks
from fastcar_compile.drs.result import RESULT_WORDS
from fastcar_compile.drs.table import (
    FLOATS_PER_WORD,
    MAX_ROWS,
    DrsTable,
    Limits,
    table_words,
)

PRODUCT_DSP = 2
"""24 by 24 bits unsigned in the 27 x 18 multipliers of a DSP48E2 (UG579): two of them."""

SCORE_DSP = 3
"""One float32 multiplication per row (as in FLOAT_MULTIPLY_DSP of usage.py)."""

CHECK_DSP = 1
"""The multiplier of the checks, 16 by 17 bits."""

ANSWER_BANKS, ANSWER_WORDS = 4, 81
"""The answer is collected in four banks of 32-bit words, so that it leaves as 128-bit words."""

BURST_BEATS = 256
"""The longest AXI4 burst."""

PRODUCT_LUT, PRODUCT_FF = 350, 400
"""The shifter, rounding and limit of one product, and its share of the adder. Estimate."""

CONTROL_LUT, CONTROL_FF = 2_500, 3_000
"""Checks, CRC-32 of a word per clock, gate, mapping and dispatch. Estimate."""


def controller_cycles(table: DrsTable, records: int = 0) -> int:
    """Return the clocks of one call for a layer with a gate, from the loops of fastcar_drs.hpp; memory latency is left out.

    The table is on chip; loading it takes `load_cycles` once.

    Args:
        records: that are dispatched; 0: all that a layer without replay has.
    """
    shape, rows, stride = table.attention, table.rows, len(table.instructions[0])
    scores = rows * (shape.query_words + shape.key_words + 1)
    return _counts_beats(rows) + 3 * MAX_ROWS + scores + stride + _answer_beats(records or rows + 2)


def load_cycles(table: DrsTable) -> int:
    """Return the clocks of loading the table; memory latency is left out."""
    words, stride = table_words(table.layers, table.rows), len(table.instructions[0])
    return words + table.layers * (stride + 1)


@dataclass(frozen=True)
class Traffic:
    """What one call moves over the controller's AXI ports: bursts of at most 256 beats, and beats of 128 bits."""

    bursts: int
    beats: int


def controller_traffic(table: DrsTable, records: int = 0) -> Traffic:
    """Return the traffic of one call for a layer with a gate; C simulation counts the same (tests/drs).

    Args:
        records: that are dispatched; 0: all that a layer without replay has.
    """
    shape, rows = table.attention, table.rows
    heads = (shape.query_words, shape.key_words)
    beats = rows * sum(heads) + _counts_beats(rows) + _answer_beats(records or rows + 2)
    return Traffic(rows * sum(ceil(words / BURST_BEATS) for words in heads) + 2, beats)


def _counts_beats(rows: int) -> int:
    return ceil(rows / FLOATS_PER_WORD)


def _answer_beats(records: int) -> int:
    return ceil((RESULT_WORDS + 2 * records) / FLOATS_PER_WORD)


def controller_usage(limits: Limits) -> Usage:
    """Return the resources besides the AXI ports."""
    lanes = FLOATS_PER_WORD
    return Usage(
        lut=CONTROL_LUT + lanes * PRODUCT_LUT,
        ff=CONTROL_FF + lanes * PRODUCT_FF,
        dsp=lanes * PRODUCT_DSP + SCORE_DSP + CHECK_DSP,
        bram36=bram_blocks(128, limits.key_words)
        + bram_blocks(32, limits.table_words)
        + bram_blocks(ANSWER_BANKS * 32, ANSWER_WORDS),
    )
