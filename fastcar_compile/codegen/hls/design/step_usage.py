"""Resources of a kernel of whole steps beside its array, unit by unit. Estimates of this project, not synthesis results.

They are counted as those of the array are (`usage.py`): products that share a DSP (WP486), float32 operators by the vendor's
library (PG060), memories by their block shapes (UG573), adders a LUT per bit (UG574).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fastcar_compile.artifact.engine import FLOATS_PER_WORD, WORD_BITS, WORD_BYTES, Usage
from fastcar_compile.codegen.hls.control_table.table import PROGRAM_WORDS
from fastcar_compile.codegen.hls.design import usage
from fastcar_compile.codegen.hls.design.controller import PRODUCT as CHANGE
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.spec import DRAFT_INSTRUCTIONS, StepBuffers
from fastcar_compile.codegen.hls.design.step_loops import TOTAL_INTERVAL, key_interval, soften_interval, value_interval
from fastcar_compile.codegen.hls.design.usage import FLOAT_ADD, STREAM, bram_blocks, memory
from fastcar_compile.codegen.hls.design.usage import FLOAT_MULTIPLY as MULTIPLY
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, BLOCK_WORDS, CacheLayout
from fastcar_compile.codegen.hls.step_program.cache_layout import LANES as CACHE_LANES
from fastcar_compile.codegen.hls.step_program.instruction import LANES
from fastcar_compile.codegen.hls.step_program.instructions import Append, Attend, Norm
from fastcar_compile.codegen.hls.step_program.program import KINDS, StepProgram
from fastcar_compile.codegen.hls.step_program.replaying import Decide
from fastcar_compile.gates.draft import GAINS


@dataclass(frozen=True)
class StepDesign:
    """The kernel that holds a step program and no more; a program that needs more is refused.

    Args:
        group: query heads that attention multiplies side by side; those of a key head come in runs of so many.
        share: rows of a video for which it reads keys and values once.
    """

    program: StepProgram
    group: int
    share: int = 1

    @classmethod
    def of(cls, program: StepProgram, group: int | None = None, share: int | None = None) -> StepDesign:
        """Return the kernel of a program.

        Args:
            group, share: see the class; None: all query heads of a key head, all rows of a video.
        """
        shared = [i.heads // i.key_heads for i in program.instructions if isinstance(i, Attend)]
        most = max(shared, default=1)
        own = program.sizes.rows // program.sizes.videos if share is None else share
        return cls(program, most if group is None else min(group, most), own)

    @property
    def opcodes(self) -> list[str]:
        """Names of the instructions that the kernel executes, those of its program; others are not built."""
        names = {instruction.name for instruction in self.program.instructions}
        # The unit of REPLAY_DRAFT has it anyway, and the test bench leaves drafts out.
        return sorted(names | ({"REPLAY"} if "REPLAY_DRAFT" in names else set()))

    @property
    def cases(self) -> dict[str, list[str]]:
        """Names of instructions by what the kernel executes for them."""
        kinds = [kind for kind in KINDS.values() if kind.name in self.opcodes]
        return {own.kernel: [kind.name for kind in kinds if kind.kernel == own.kernel] for own in kinds}

    @property
    def opcode_bits(self) -> int:
        """Bit n: the kernel executes the opcode n."""
        return sum(1 << opcode for opcode, kind in KINDS.items() if kind.name in self.opcodes)

    @property
    def reads_constants(self) -> bool:
        """Whether there are any: norm weights and RoPE tables of whole steps, networks of gates."""
        return self.program.whole or self.program.sizes.constant_words > 0

    @property
    def blocks(self) -> int:
        """Blocks of 32 elements of the longest head."""
        found = (i.blocks for i in self.program.instructions if isinstance(i, Append | Attend | Decide))
        return max(found, default=1)

    @property
    def instructions(self) -> int:
        """Instructions of a program."""
        return len(self.program.instructions)

    @property
    def norm_words(self) -> int:
        """Memory words of the longest weight of a norm."""
        return max((i.count for i in self.program.instructions if isinstance(i, Norm)), default=1)

    @property
    def layers(self) -> int:
        """Layers that the report has room for: up to the last one that decides."""
        return 1 + max((i.layer for i in self.program.instructions if isinstance(i, Decide)), default=0)

    @property
    def positions(self) -> int:
        """Positions of a head whose logits are on chip: whole tiles of values."""
        return -(-self.program.sizes.positions // BLOCK) * BLOCK

    @property
    def program_words(self) -> int:
        """Memory words of the program."""
        return self.instructions * PROGRAM_WORDS // LANES


LIMBS = 2
"""Rows of multipliers of a query head (LIMBS of fastcar_attention_core.hpp)."""

ROOT = Usage(lut=1_400, ff=1_500)
"""A square root of a float32: 25 steps of a subtraction of at most 27 bits and a choice. Estimate."""

CONVERT = usage.measured("float_of_int")
"""A conversion between float32 and an integer, or a rounding, which takes less (no DSP). Measured."""

DIVIDE = Usage(lut=800, ff=1_400)
"""A float32 division without DSPs. Estimate."""

INTEGER = Usage(dsp=1)
"""A product of integers of at most 27 by 18 bits: a square of a norm, the step between two powers of two."""

POWERS = (32, 257)
"""Bits and depth of the table of powers of two (fastcar_tables.hpp); one per query head."""

SUM = Usage(lut=64, ff=usage.STAGES * 64)
"""An adder of 64 bits: a LUT per bit."""

COMPARE = Usage(lut=70, ff=usage.STAGES * 70)
"""A comparison of two float32: a LUT for a bit of each, and the cases of signs and of NaN. Estimate."""

SEQUENCER = Usage(lut=3_000, ff=3_000)
"""Fields of an instruction, counters and addresses of all vector loops. Estimate."""

VALUE_FIFO_WORDS = 64
"""128-bit words of values that wait on every port until their weights are known (fastcar_step.cpp.j2)."""

LIMB_SUM_LUT = 32
"""A sum of two limbs in an accumulator, a LUT per bit."""

NORM_LOOPS, CENTER_LOOPS = 4, 3
"""Loops of norms and of the mean of layer norms that read x or y, or a; a LUT6 chooses one of two for two bits (UG574), or one of three
for one."""

LOADER = Usage(lut=1_500, ff=1_500)
"""Checks and CRC-32 of a step program, beside those of the control table. Estimate."""

SHORT = Usage(lut=2_000, ff=2_000)
"""Loader and sequencer of short programs, whose three opcodes have few checks and no vector loops. Estimate."""


def short_usage(layers: int, linears: int) -> Usage:
    """Return what a kernel of short programs has beside its array and controller: a decision and an MLP per layer, linears."""
    instructions = 4 * layers + 2 * linears
    program = bram_blocks(WORD_BITS, instructions * PROGRAM_WORDS // FLOATS_PER_WORD)
    # Nothing is read through the port of the results, which the array is counted with.
    return SHORT + Usage(bram36=program - usage.READS.blocks(WORD_BYTES))


def step_usage(design: Design, buffers: StepBuffers) -> Usage:
    """Return the resources of all units together."""
    return sum(step_units(design, buffers).values(), start=Usage())


def step_units(design: Design, buffers: StepBuffers) -> dict[str, Usage]:
    """Return what a kernel of whole steps has besides its array, AXI ports and controller, by the names of its units.

    Halves of a BRAM36 of different units are not put together.
    """
    units = (_attention_units, _vector_units, _layer_norm_units, _draft_units, _store_units)
    return {name: used for own in units for name, used in own(design, buffers).items()}


def _array(ports: int, buffers: StepBuffers) -> Usage:
    """Return the multipliers of a product of attention: two limbs of every query head, against a word of every port."""
    rows = LIMBS * buffers.lanes
    around = sum(usage.adders(rows, ports, CACHE_LANES))
    products = CACHE_LANES * usage.multipliers(rows, ports)
    sums = Usage(lut=around + rows * ports * LIMB_SUM_LUT, ff=usage.STAGES * around, dsp=products)
    return sums + memory(WORD_BITS, BLOCK_WORDS * buffers.blocks, rows)


def _shared(one: Usage, times: int, interval: int) -> Usage:
    """Return operators of which each serves as many places as an iteration has clocks, and the choice of its operands."""
    choice = Usage(lut=2 * 32) if interval > 1 else Usage()
    return (one + choice) * ceil(times / interval)


def _attention_units(design: Design, buffers: StepBuffers) -> dict[str, Usage]:
    ports, four, heads, blocks = design.ports, FLOATS_PER_WORD, buffers.lanes, buffers.blocks
    limbs, quad = LIMBS * heads * WORD_BITS, four * (32 * heads + buffers.share)
    slots = CacheLayout(ports, blocks * BLOCK, buffers.positions).slots
    logits, powers = memory(32, buffers.positions, heads), memory(*POWERS, heads)
    keys, values = key_interval(blocks, ports), value_interval(ports)
    return {
        "cache streams": STREAM * (4 * ports) + memory(WORD_BITS, VALUE_FIFO_WORDS, ports),
        "query limbs": _shared(MULTIPLY + CONVERT, four, keys) + memory(limbs, BLOCK_WORDS * blocks, 2),
        "key multipliers": _array(ports, buffers),
        "logits": _shared(MULTIPLY + CONVERT, heads * blocks, keys)
        + _shared(MULTIPLY, heads, keys)
        + _shared(FLOAT_ADD, heads * (blocks - 1), keys),
        "softmax": _shared(MULTIPLY + FLOAT_ADD + CONVERT + INTEGER, heads, soften_interval(blocks, ports, heads))
        + SUM * heads
        + (MULTIPLY + CONVERT + DIVIDE)
        + (logits + powers + memory(quad, buffers.positions // four + 16)),
        "value weights": _shared(MULTIPLY + CONVERT, 2 * four * heads, values)
        + (memory(quad, BLOCK // four) + memory(32 * four * heads, 32) + memory(limbs, 16)),
        "value multipliers": _array(ports, buffers),
        "totals": _shared(MULTIPLY + FLOAT_ADD + CONVERT, heads * ports, TOTAL_INTERVAL)
        + (MULTIPLY * four + memory(32, blocks * slots, heads * ports)),
    }


def _vector_units(design: Design, buffers: StepBuffers) -> dict[str, Usage]:
    four, blocks = FLOATS_PER_WORD, buffers.blocks
    tile = CacheLayout(design.ports, blocks * BLOCK, buffers.positions).value_tile_words
    head, beat = blocks * BLOCK // four, design.axi_words * WORD_BITS
    return {
        "norm": MULTIPLY * (2 * four + 3) + INTEGER * four + (FLOAT_ADD + DIVIDE + ROOT + CONVERT + SUM),
        "rotate": (MULTIPLY * 2 + FLOAT_ADD) * four + memory(WORD_BITS, head, 2),
        "append": (MULTIPLY + CONVERT) * four + memory(beat, tile, design.axi_weight_ports) + memory(WORD_BITS, head),
        "gather": (MULTIPLY + CONVERT) * four,
        "add": FLOAT_ADD * four,
    }


def _layer_norm_units(_design: Design, buffers: StepBuffers) -> dict[str, Usage]:
    """Return what layer norms take beside root-mean-square norms: sum and mean of a row, the difference, and the bias."""
    if not buffers.layer_norms:
        return {}
    choices = Usage(lut=(NORM_LOOPS + CENTER_LOOPS) * WORD_BITS // 2)
    return {"layer norm": FLOAT_ADD * (2 * FLOATS_PER_WORD) + (MULTIPLY * 2 + CONVERT + SUM) + choices}


def _draft_units(design: Design, _buffers: StepBuffers) -> dict[str, Usage]:
    """Return what drafts take beside the array's rows: their gain, the difference of features, and the sum of a row."""
    if not design.drafts:
        return {}
    # Its loops take four clocks for a word, so that one operator serves the four values of it.
    gain = FLOAT_ADD + CHANGE * 2 + SUM * 2 + CONVERT * 2 + DIVIDE + COMPARE + memory(32, 2 * GAINS)
    return {"draft": gain + (MULTIPLY + FLOAT_ADD) + (MULTIPLY + FLOAT_ADD * 3)}


def _store_units(design: Design, buffers: StepBuffers) -> dict[str, Usage]:
    beat, axi, uram = design.axi_words * WORD_BITS, design.axi_weight_ports, design.rows_in_uram
    # Places X, A and Y of all rows. Of a draft, x and the recalled x are side by side in A.
    a_words = max(buffers.query_words, 2 * buffers.norm_words if design.drafts else 0)
    places = (buffers.rows * words for words in (buffers.norm_words, a_words, buffers.qkv_words))
    rows = sum((memory(WORD_BITS, words, uram=uram) for words in places), start=Usage())
    # Of one row: the weight of a norm; q or x; the key or the kept x. They would fill a quarter of an UltraRAM.
    for words in (buffers.norm_words, buffers.query_words, buffers.key_words):
        rows += memory(WORD_BITS, words)
    fifos = memory(beat, design.step_fifo_words // design.axi_words, axi, uram=uram)
    short = bram_blocks(beat, design.fifo_words // design.axi_words, axi)
    instructions = buffers.instructions + DRAFT_INSTRUCTIONS * len(design.drafts)
    program = memory(WORD_BITS, instructions * PROGRAM_WORDS // FLOATS_PER_WORD)
    # Weights and caches share AXI ports, unless the engine is a kernel of its own.
    reads = usage.PORT * axi + Usage(bram36=usage.READS.blocks(design.axi_words * WORD_BYTES, axi))
    apart = {"cache ports": reads} if design.engine == "rtl" else {}
    return apart | {
        "cache writes": Usage(bram36=usage.WRITES.blocks(design.axi_words * WORD_BYTES, axi)),
        "rows": rows + Usage(lut=NORM_LOOPS * WORD_BITS // 2),
        # In place of the shorter ones that the array is counted with: the negative count takes them out of the sum.
        "weight FIFOs": fifos + Usage(bram36=-short),
        "program": LOADER + program,
        "sequencer": SEQUENCER,
    }
