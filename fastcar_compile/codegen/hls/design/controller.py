"""The TAS unit and DRS controller: how often each of its loops iterates, how long its pipeline is, what it moves; its clocks and resources.

The loops run one after the other, and so do those that place the rows before the array starts (fastcar_drs.hpp,
fastcar_step.cpp). The closed form and the cycle model use the same loops. Depths are estimates, as in `loops.py`; so are
resources, which are no synthesis results."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import ceil

from fastcar_compile.artifact.engine import Usage
from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS
from fastcar_compile.codegen.hls.control_table.table import (
    BFLOATS_PER_WORD,
    FLOATS_PER_WORD,
    HEADER_WORDS,
    LAYER_FIELDS,
    MAX_ROWS,
    DrsTable,
    Limits,
    network_words,
)
from fastcar_compile.codegen.hls.design.loops import (
    ADD_CLOCKS,
    COMPARE,
    DIVIDE,
    INTEGER,
    MULTIPLY,
    READ,
    TO_FLOAT,
    WRITE,
    Loop,
)
from fastcar_compile.codegen.hls.design.usage import bram_blocks, measured
from fastcar_compile.gates.registry import GateKind

REMAINDER_BITS = 32
"""Bits of the number of a forward, one per clock."""

SHIFT = 2
"""Stages of a shifter of 64 bits with rounding."""

PRODUCT_DEPTH = READ + MULTIPLY + SHIFT + 3 * INTEGER
"""Four products of float32 values as integers and their sum. An open HLS tool reports 4 stages for it at 250 MHz; this is
with the key's block RAM."""

CHANGE_DEPTH = READ + ADD_CLOCKS + SHIFT + 3 * INTEGER
FEATURE_DEPTH = READ + ADD_CLOCKS + INTEGER + WRITE
ROUND_FEATURE_DEPTH = READ + SHIFT + INTEGER + WRITE
WEIGHT_DEPTH = READ + MULTIPLY + SHIFT + 4 * INTEGER
UNIT_DEPTH = READ + TO_FLOAT + 2 * MULTIPLY + ADD_CLOCKS + COMPARE + MULTIPLY + SHIFT + INTEGER

TABLE_INTERVAL = 4
"""Clocks of the table's loop per 128-bit word: the CRC takes a word of 32 bits per clock (FASTCAR_PIPELINE(4))."""

CHECKS = 10
"""Products that the checks of a header compute, one after the other (fastcar_drs.hpp)."""

DECODE_PRODUCTS = 4
"""Products behind each other when a call's loop bounds are decoded (last_product and in_section)."""


class ControlOp(StrEnum):
    """What the controller does in one call of the engine."""

    TABLE = "load the table"
    GATE = "decide by a short program"
    PLACE = "place the rows"


@dataclass(frozen=True)
class ControlWork:
    """What the controller does in one call, with this table."""

    op: ControlOp
    table: DrsTable


@lru_cache(maxsize=4096)
def control_loops(work: ControlWork) -> tuple[Loop, ...]:
    """Return the loops of one call, in order; those of PLACE run before the array starts."""
    table = work.table
    match work.op:
        case ControlOp.PLACE:
            bounds = Loop("decode", "bounds", 1, DECODE_PRODUCTS * MULTIPLY)
            return bounds, Loop("place_rows", "rows", MAX_ROWS, INTEGER + WRITE)
        case ControlOp.TABLE:
            return *_load_loops(table), _answer(1)
        case ControlOp.GATE:
            return Loop("fastcar_decide", "copy_chain_counts", table.rows, WRITE), *decision_loops(table)


def _answer(beats: int) -> Loop:
    return Loop("write_answer", "write_words", beats, READ, moves=True)


def _scores(table: DrsTable, *, apart: bool) -> tuple[Loop, ...]:
    """Return the loops of all rows' scores and of their comparison with the threshold."""
    first = FIRST_LOOPS[table.gate](table) if table.gate in FIRST_LOOPS else ()
    refresh = (Loop("remainder_of", "shift_bits", REMAINDER_BITS, COMPARE + INTEGER),) if table.refresh_period else ()
    compare = Loop("rows_that_pass", "compare_rows", table.rows, READ + COMPARE + INTEGER)
    # One unit scores the rows, one after the other: the loops of a row repeat.
    scores = SCORE_LOOPS[table.gate](table)
    return *((*first, *scores) * table.rows if apart else (*first, *scores * table.rows)), compare, *refresh


def decision_loops(table: DrsTable, *, apart: bool = False) -> tuple[Loop, ...]:
    """Return the loops of `decide_layer`, and of its answer. apart: the operands of one row after another come on chip."""
    return (
        Loop("read_layer", "fields", ceil(LAYER_FIELDS / 2), READ),  # two words of a block RAM per clock
        Loop("begin_layer", "clear_scores", MAX_ROWS, WRITE),
        *_scores(table, apart=apart),
        Loop("report_rows", "report_each_row", MAX_ROWS, READ + INTEGER + WRITE),
        _answer(RESULT_WORDS // FLOATS_PER_WORD),
    )


def _load_loops(table: DrsTable) -> tuple[Loop, ...]:
    """Return the loops that load a table and check it."""
    header, beats = HEADER_WORDS // FLOATS_PER_WORD, table.words // FLOATS_PER_WORD
    return (
        Loop("load_words", "read_table (header)", header, WRITE, TABLE_INTERVAL, moves=True),
        Loop("load_table", "copy_header", HEADER_WORDS, READ + WRITE),
        Loop("load_words", "read_table", beats - header, WRITE, TABLE_INTERVAL, moves=True),
        # A check waits for the product before it, so the interval is as long as the check.
        Loop("load_table", "checks", CHECKS, MULTIPLY, MULTIPLY + COMPARE),
    )


def _key(words: int) -> Loop:
    return Loop("load_key", "read_key", words, WRITE, moves=True)


def _tas(table: DrsTable) -> tuple[Loop, ...]:
    name, label, depth = "row_sum", "read_query", PRODUCT_DEPTH
    if table.weighted_heads:
        name, label, depth = "weighted_row_sum", "read_weighted_query", PRODUCT_DEPTH + MULTIPLY
    return (
        _key(table.row_key_words),
        Loop(name, label, table.row_query_words, depth, moves=True),
        Loop("scores_of_rows", "score", 1, TO_FLOAT + MULTIPLY + WRITE),
    )


def _head_weights(table: DrsTable) -> tuple[Loop, ...]:
    return (Loop("load_weights", "copy_weights", table.attention.heads, READ + WRITE),) if table.weighted_heads else ()


def _units(_table: DrsTable) -> tuple[Loop, ...]:
    return (Loop("network_scores", "units", 1, READ, moves=True),)


def _input_delta(table: DrsTable) -> tuple[Loop, ...]:
    return (
        _key(table.input_words),
        Loop("change_of_row", "read_change", table.input_words, CHANGE_DEPTH, moves=True),
        Loop("change_scores", "score", 1, TO_FLOAT + COMPARE + DIVIDE + WRITE),
    )


def _learned(table: DrsTable) -> tuple[Loop, ...]:
    # A word of weights has eight values, so the features of a row fill pairs of words of four.
    padded, depth = table.input_words + table.input_words % 2, FEATURE_DEPTH + table.input_words % 2
    # The first word of a network is its number of units; every row reads the others.
    weights = network_words(table.units, FLOATS_PER_WORD * table.input_words) - 1
    return (
        _key(table.input_words),
        Loop("features_of_row", "read_features", table.input_words, depth, moves=True),
        Loop("round_features", "round_words", 2 * padded, ROUND_FEATURE_DEPTH),
        Loop("sums_of_units", "read_weights", weights, WEIGHT_DEPTH, moves=True),
        Loop("network_score", "add_units", table.units, UNIT_DEPTH),
        Loop("network_score", "score", 1, TO_FLOAT + MULTIPLY + ADD_CLOCKS + WRITE),
    )


SCORE_LOOPS: dict[GateKind, Callable[[DrsTable], tuple[Loop, ...]]] = {
    GateKind.TAS: _tas,
    GateKind.INPUT_DELTA: _input_delta,
    GateKind.LEARNED: _learned,
}
"""By gate: the loops of one row's score."""

FIRST_LOOPS: dict[GateKind, Callable[[DrsTable], tuple[Loop, ...]]] = {
    GateKind.TAS: _head_weights,
    GateKind.LEARNED: _units,
}
"""By gate: the loops before the first row."""


# Clocks and resources.


PRODUCT_DSP = 2
"""24 by 24 bits unsigned in the 27 x 18 multipliers of a DSP48E2 (UG579): two of them."""

SCORE_DSP = 3
"""One float32 multiplication per row (as in FLOAT_MULTIPLY of usage.py)."""

CHECK_DSP = 1
"""The multiplier of the checks, 16 by 17 bits."""

ANSWER_BANKS = 4
"""The answer is collected in four banks of 32-bit words, so that it leaves as 128-bit words."""

TAS_PRODUCT = measured("fixed_product")
"""Shifter, rounding and limit of one product of q and a key. Measured."""

PRODUCT = Usage(lut=350, ff=400)
"""The same of a product or magnitude of another gate, and its share of the adder. Estimate."""

CONTROL = Usage(lut=2_500, ff=3_000)
"""Checks, CRC-32 of a word per clock, gate and mapping. Estimate."""

SUBTRACT_DSP, DIVIDE_DSP = 2, 0
"""DSPs of a float32 operator of the vendor's library with full use of DSPs (PG060); a divider has none."""

WEIGHT_DSP = 1
"""8 by 23 bits of a bfloat16 weight and a feature."""

UNIT_BITS = 160
"""What is kept of a unit of a network: its sum, b1, w2 and the exponent."""


_CHANGE = Usage(dsp=FLOATS_PER_WORD * SUBTRACT_DSP + DIVIDE_DSP) + PRODUCT * (2 * FLOATS_PER_WORD)
_NETWORK = Usage(dsp=BFLOATS_PER_WORD * WEIGHT_DSP + PRODUCT_DSP + 2 * SCORE_DSP + 2 * SUBTRACT_DSP)
SCORE_UNITS = {
    GateKind.TAS: Usage(dsp=FLOATS_PER_WORD * PRODUCT_DSP + SCORE_DSP) + TAS_PRODUCT * FLOATS_PER_WORD,
    GateKind.INPUT_DELTA: _CHANGE,
    GateKind.LEARNED: Usage(dsp=FLOATS_PER_WORD * SUBTRACT_DSP)
    + PRODUCT * (FLOATS_PER_WORD + BFLOATS_PER_WORD + 1)
    + _NETWORK,
}
"""By gate: four products per clock; four changes per clock and two magnitudes each; for a network four features, eight
products of the first layer, one of the second, and the scaling and bias of both. A product has a shifter with rounding.
Estimate."""


def controller_cycles(table: DrsTable) -> int:
    """Return the clocks of one decision, without memory latency (`control_loops`); the table is on chip."""
    return sum(loop.cycles for loop in control_loops(ControlWork(ControlOp.GATE, table)))


def controller_usage(limits: Limits) -> Usage:
    """Return the resources besides the AXI ports."""
    kind = limits.gate or GateKind.TAS
    # Gate `learned` keeps x and its change as features, both padded to whole words of weights.
    features = 2 * limits.key_words + 2 if kind is GateKind.LEARNED else 0
    weighted = kind is GateKind.TAS and limits.heads > 0
    bits_depth = (
        (128, limits.key_words),
        (128, features),
        (UNIT_BITS, limits.units),
        (32, limits.heads),
        (32, limits.table_words),
        (ANSWER_BANKS * 32, RESULT_WORDS // ANSWER_BANKS),
    )
    dsp = CHECK_DSP + (FLOATS_PER_WORD * SCORE_DSP if weighted else 0)
    return CONTROL + SCORE_UNITS[kind] + Usage(dsp=dsp, bram36=sum(itertools.starmap(bram_blocks, bits_depth)))
