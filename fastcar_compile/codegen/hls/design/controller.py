"""Clocks and resources of the TAS unit and DRS controller. Estimates of this project, not synthesis results."""

import itertools

from fastcar_compile.artifact.engine import Usage
from fastcar_compile.codegen.hls.control_table.gate import BFLOATS_PER_WORD
from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS
from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD, DrsTable, Limits
from fastcar_compile.codegen.hls.design.control_loops import ControlOp, ControlWork, control_loops
from fastcar_compile.codegen.hls.design.usage import bram_blocks, measured
from fastcar_compile.gates.registry import GateKind

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
