"""Resources of a kernel of whole steps beside its array, unit by unit. Estimates of this project, not synthesis results.

They are counted as those of the array are (`usage.py`): products that share a DSP (WP486), float32 operators by the vendor's
library (PG060), memories by their block shapes (UG573), adders a LUT per bit (UG574).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from fastcar_compile.codegen.hls.control_table.table import INSTRUCTION_WORDS
from fastcar_compile.codegen.hls.design.controller import ROOT_FF, ROOT_LUT
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import FLOATS_PER_WORD, WORD_BITS, WORD_BYTES
from fastcar_compile.codegen.hls.design.spec import StepBuffers
from fastcar_compile.codegen.hls.design.usage import (
    FIFO_WORDS,
    FLOAT_ADD_DSP,
    FLOAT_FF,
    FLOAT_LUT,
    FLOAT_MULTIPLY_DSP,
    READS,
    STAGES,
    STEP_FIFO_WORDS,
    STREAM_FF,
    STREAM_LUT,
    WRITES,
    Usage,
    adders,
    bram_blocks,
    lut_ram,
    multipliers,
    uram_blocks,
)
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, BLOCK_WORDS, CacheLayout, Sizes
from fastcar_compile.codegen.hls.step_program.cache_layout import LANES as CACHE_LANES
from fastcar_compile.codegen.hls.step_program.instructions import LANES, ROWS_ON_CHIP, Append, Attend, Decide, Opcode
from fastcar_compile.codegen.hls.step_program.program import StepProgram

# What a kernel of whole decode steps has besides its array: rows, query heads and positions on chip.


@dataclass(frozen=True)
class StepDesign:
    """The kernel that holds a step program and no more; a program that needs more is refused.

    Args:
        group: query heads that attention multiplies side by side; those of a key head come in runs of so many.
    """

    program: StepProgram
    group: int

    @classmethod
    def of(cls, program: StepProgram, group: int | None = None) -> StepDesign:
        """Return the kernel of a program.

        Args:
            group: see the class; None: all query heads of a key head.
        """
        shared = [i.heads // i.key_heads for i in program.instructions if isinstance(i, Attend)]
        most = max(shared, default=1)
        return cls(program, most if group is None else min(group, most))

    @property
    def whole(self) -> bool:
        """Whether rows are on chip, for whole steps; else they are in memory, for short programs."""
        return self.program.whole

    @property
    def opcodes(self) -> list[str]:
        """Names of the instructions that the kernel executes, those of its program; others are not built."""
        return sorted({instruction.opcode.name for instruction in self.program.instructions})

    @property
    def opcode_bits(self) -> int:
        """Bit n: the kernel executes the opcode n."""
        return sum(1 << Opcode[name] for name in self.opcodes)

    @property
    def reads_constants(self) -> bool:
        """Whether there are any: norm weights and RoPE tables of whole steps, networks of gates."""
        return self.whole or self.sizes.constant_words > 0

    @property
    def sizes(self) -> Sizes:
        """Sizes of memory and of the rows on chip."""
        return self.program.sizes

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
    def layers(self) -> int:
        """Layers that the report has room for: up to the last one that decides."""
        return 1 + max((i.layer for i in self.program.instructions if isinstance(i, Decide)), default=0)

    @property
    def positions(self) -> int:
        """Positions of a head whose logits are on chip: whole tiles of values."""
        return -(-self.sizes.positions // BLOCK) * BLOCK

    @property
    def program_words(self) -> int:
        """Memory words of the program."""
        return self.instructions * INSTRUCTION_WORDS // LANES


Memory = tuple[int, int, int]
"""Copies, bits and depth of a memory."""

LIMBS = 2
"""Rows of multipliers of a query head (LIMBS of fastcar_attention_core.hpp)."""

MULTIPLY_LUT, MULTIPLY_FF = 150, 250
"""Fabric around one float32 multiplier, whose mantissas are in its DSPs: exponents and rounding. Estimate; FLOAT_LUT is that of
an adder, which shifts."""

CONVERT_LUT, CONVERT_FF = 200, 200
"""A conversion between float32 and an integer, or a rounding (no DSP). Estimate."""

DIVIDE_LUT, DIVIDE_FF = 800, 1_400
"""A float32 division without DSPs. Estimate."""

INTEGER_DSP = 1
"""A product of integers of at most 27 by 18 bits: a square of a norm, the step between two powers of two."""

POWERS = (32, 257)
"""Bits and depth of the table of powers of two (fastcar_exp_table.hpp); one per query head."""

SUM_BITS, SUM_LUT = 64, 64
"""An adder of 64 bits: a LUT per bit."""

SEQUENCER_LUT, SEQUENCER_FF = 3_000, 3_000
"""Fields of an instruction, counters and addresses of all vector loops. Estimate."""

VALUE_FIFO_WORDS = 64
"""128-bit words of values that wait on every port until their weights are known (fastcar_step.cpp.j2)."""

LIMB_SUM_LUT = 32
"""A sum of two limbs in an accumulator, a LUT per bit."""

PLACE_USERS, PLACE_LUT = 9, 2
"""Loops that read a place of the rows which the instruction names, and LUTs per bit of a choice of five (UG574: a LUT6 chooses
one of four)."""

LOADER_LUT, LOADER_FF = 1_500, 1_500
"""Checks and CRC-32 of a step program, beside those of the control table. Estimate."""


SHORT_LUT, SHORT_FF = 2_000, 2_000
"""Loader and sequencer of short programs, whose three opcodes have few checks and no vector loops. Estimate."""


def short_usage(layers: int, linears: int) -> Usage:
    """Return what a kernel of short programs has beside its array and controller: a decision and an MLP per layer, linears."""
    instructions = 4 * layers + 2 * linears
    program = bram_blocks(WORD_BITS, instructions * INSTRUCTION_WORDS // FLOATS_PER_WORD)
    # Nothing is read through the port of the results, which the array is counted with.
    return Usage(lut=SHORT_LUT, ff=SHORT_FF, dsp=0, bram36=program - READS.blocks(WORD_BYTES))


@dataclass(frozen=True)
class Unit:
    """A part of the kernel.

    Args:
        multiply, add, divide, root: float32 operators. convert: conversions and roundings.
        dsp, lut, ff: besides those. memories: copies, bits and depth of each.
        uram: whether the memories are in UltraRAM. bram36: besides the memories.
    """

    name: str
    multiply: int = 0
    add: int = 0
    divide: int = 0
    root: int = 0
    convert: int = 0
    dsp: int = 0
    lut: int = 0
    ff: int = 0
    memories: tuple[Memory, ...] = ()
    uram: bool = False
    bram36: int = 0

    @property
    def usage(self) -> Usage:
        """The resources of this unit; halves of a BRAM36 of different units are not put together."""
        luts = self.lut + sum(n * lut_ram(bits, depth) for n, bits, depth in self.memories)
        return Usage(
            lut=luts
            + self.multiply * MULTIPLY_LUT
            + self.add * FLOAT_LUT
            + self.convert * CONVERT_LUT
            + self.divide * DIVIDE_LUT
            + self.root * ROOT_LUT,
            ff=self.ff
            + self.multiply * MULTIPLY_FF
            + self.add * FLOAT_FF
            + self.convert * CONVERT_FF
            + self.divide * DIVIDE_FF
            + self.root * ROOT_FF,
            dsp=self.dsp + self.multiply * FLOAT_MULTIPLY_DSP + self.add * FLOAT_ADD_DSP,
            bram36=self.bram36
            + (0 if self.uram else sum(bram_blocks(bits, depth, n) for n, bits, depth in self.memories)),
            uram=sum(n * uram_blocks(bits, depth) for n, bits, depth in self.memories) if self.uram else 0,
        )


@dataclass(frozen=True)
class StepParts:
    """What units depend on: the buffers, logical ports, words of an AXI port's beat, and where rows are."""

    buffers: StepBuffers
    ports: int
    axi_words: int
    rows_in_uram: bool

    @classmethod
    def of(cls, design: Design, buffers: StepBuffers) -> StepParts:
        """Return the parts beside an array."""
        return cls(buffers, design.ports, design.axi_words, design.rows_in_uram)

    @property
    def layout(self) -> CacheLayout:
        """Tiles of keys and values."""
        return CacheLayout(self.ports, self.buffers.blocks * BLOCK, self.buffers.positions)


def step_usage(parts: StepParts) -> Usage:
    """Return the resources of all units together."""
    return total([unit.usage for unit in step_units(parts)])


def total(usages: Sequence[Usage]) -> Usage:
    """Return the sum of resources."""
    return Usage(**{f.name: sum(getattr(usage, f.name) for usage in usages) for f in fields(Usage)})


def step_units(parts: StepParts) -> tuple[Unit, ...]:
    """Return what a kernel of whole steps has besides its array, AXI ports and controller."""
    return (*_attention_units(parts), *_vector_units(parts), *_store_units(parts))


def _array(name: str, parts: StepParts) -> Unit:
    """Return the multipliers of a product of attention: two limbs of every query head, against a word of every port."""
    rows, ports = LIMBS * parts.buffers.group, parts.ports
    around = sum(adders(rows, ports, CACHE_LANES))
    return Unit(
        name,
        dsp=CACHE_LANES * multipliers(rows, ports),
        lut=around + rows * ports * LIMB_SUM_LUT,
        ff=STAGES * around,
        memories=((rows, WORD_BITS, BLOCK_WORDS * parts.buffers.blocks),),
    )


def _attention_units(parts: StepParts) -> tuple[Unit, ...]:
    buffers, layout, ports, four = parts.buffers, parts.layout, parts.ports, FLOATS_PER_WORD
    heads, blocks = buffers.group, buffers.blocks
    limbs, quad = LIMBS * heads * WORD_BITS, four * (32 * heads + 1)
    return (
        Unit(
            "cache streams",
            lut=4 * ports * STREAM_LUT,
            ff=4 * ports * STREAM_FF,
            memories=((ports, WORD_BITS, VALUE_FIFO_WORDS),),
        ),
        Unit("query limbs", multiply=four, convert=four, memories=((2, limbs, BLOCK_WORDS * blocks),)),
        _array("key multipliers", parts),
        Unit("logits", multiply=heads * (blocks + 1), add=heads * (blocks - 1), convert=heads * blocks),
        Unit(
            "softmax",
            multiply=heads + 1,
            add=heads,
            divide=1,
            convert=heads + 1,
            dsp=heads * INTEGER_DSP,
            lut=heads * SUM_LUT,
            ff=STAGES * heads * SUM_LUT,
            memories=((heads, 32, buffers.positions), (1, quad, buffers.positions // four + 16), (heads, *POWERS)),
        ),
        Unit(
            "value weights",
            multiply=2 * four * heads,
            convert=2 * four * heads,
            memories=((1, quad, BLOCK // four), (1, 32 * four * heads, 32), (1, limbs, 16)),
        ),
        _array("value multipliers", parts),
        Unit(
            "totals",
            multiply=heads * ports + four,
            add=heads * ports,
            convert=heads * ports,
            memories=((heads * ports, 32, blocks * layout.slots),),
        ),
    )


def _vector_units(parts: StepParts) -> tuple[Unit, ...]:
    buffers, four, axi = parts.buffers, FLOATS_PER_WORD, parts.ports // parts.axi_words
    beat, floats = parts.axi_words * WORD_BITS, buffers.blocks * BLOCK // four
    return (
        Unit(
            "norm",
            multiply=2 * four + 3,
            add=1,
            divide=1,
            root=1,
            convert=1,
            dsp=four * INTEGER_DSP,
            lut=SUM_LUT,
            ff=STAGES * SUM_LUT,
        ),
        Unit("rotate", multiply=2 * four, add=four, memories=((2, WORD_BITS, floats),)),
        Unit(
            "append",
            multiply=four,
            convert=four,
            memories=((axi, beat, parts.layout.value_tile_words), (1, WORD_BITS, floats)),
        ),
        Unit("gather", multiply=four, convert=four),
        Unit("add", add=2 * four),  # of two rows, or of a row and a slot of the replay buffer
    )


def _store_units(parts: StepParts) -> tuple[Unit, ...]:
    buffers, whole = parts.buffers, parts.buffers.rows * parts.buffers.row_words
    rows = ((ROWS_ON_CHIP, WORD_BITS, whole), (1, WORD_BITS, buffers.row_words))
    read = buffers.query_words + buffers.key_words, 2 * buffers.key_words  # q and x; the key and the kept x
    operands = ((1, WORD_BITS, buffers.rows * words) for words in read)
    axi, beat = parts.ports // parts.axi_words, parts.axi_words * WORD_BITS
    fifos = (axi, beat, STEP_FIFO_WORDS // parts.axi_words)
    # The negative count takes the array's FIFOs out of the sum.
    short = bram_blocks(beat, FIFO_WORDS // parts.axi_words, axi)
    program = (1, WORD_BITS, buffers.instructions * INSTRUCTION_WORDS // FLOATS_PER_WORD)
    return (
        Unit("cache writes", bram36=WRITES.blocks(parts.axi_words * WORD_BYTES, axi)),
        Unit("rows", lut=PLACE_USERS * WORD_BITS * PLACE_LUT, memories=(*rows, *operands), uram=parts.rows_in_uram),
        # In place of the shorter ones that the array is counted with.
        Unit("weight FIFOs", memories=(fifos,), uram=parts.rows_in_uram, bram36=-short),
        Unit("program", lut=LOADER_LUT, ff=LOADER_FF, memories=(program,)),
        Unit("sequencer", lut=SEQUENCER_LUT, ff=SEQUENCER_FF),
    )
