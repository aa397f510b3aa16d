"""Choose lanes, ports and tiles of the MLP kernel within a board's budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from fastcar_compile.codegen.hls import resources
from fastcar_compile.codegen.hls.resources import Usage, bram_blocks, lut_ram, uram_blocks
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec
from fastcar_compile.errors import CompileError
from fastcar_compile.ops.quant import GROUP, group_count

WORD_BITS, WORD_BYTES, FLOATS_PER_WORD = 128, 16, 4
FACTOR_ROM = (1, 32, 513)
"""Copies, bits and depth of the activation's table, one per core."""

ROW_PORTS = 2
"""AXI ports besides the weights: one reads x, one reads the cached rows and writes y."""

MAC_ARRAYS = 2
"""Each of the two products has an array of its own: as functions of different sizes they share none."""

SECTION_WORDS = 256
"""A port's section of the stream starts at a multiple of 4 KiB, which no AXI burst may cross."""

ADD_LATENCY = 8
"""Clocks of a float32 addition into the same group total. Estimate; Vitis HLS takes 4 to 8 at 200 to 300 MHz."""

PORT_CHOICES = (8, 4, 2, 1)
TILE_WORD_CHOICES = (1024, 512, 256, 128, 64)
"""Words of one tile on one port: one or two BRAM depths, then smaller."""

URAM_TILE_WORD_CHOICES = (2048, 1024)
"""The same where tiles are in UltraRAM: half a block or less. Longer tiles only lengthen the first and the last."""

PREFETCH_WORD_CHOICES = (4096, 2048, 1024, 512, 256, 128)
"""Words of the prefetch buffer per port: from the depth of one URAM to what is no longer worth a block RAM."""


@dataclass(frozen=True)
class StageShape:
    """One matrix product: `channels` outputs of `inputs` int8 values, cut into tiles.

    Channel (t * tile + j) * ports + p is row j of tile t on weight port p.

    Args:
        bits: of a weight, 8 or 4; 4: float16 scales for groups of 128 inputs.
        bias: whether a tile has float32 biases.
    """

    inputs: int
    channels: int
    ports: int
    tile: int
    tiles: int
    bits: int = 8
    bias: bool = False

    @property
    def lanes(self) -> int:
        """Weights in one 128-bit word."""
        return WORD_BITS // self.bits

    @property
    def sums(self) -> int:
        """int32 sums of one channel: one, or one per group."""
        return 1 if self.bits == 8 else group_count(self.inputs)

    @property
    def channel_words(self) -> int:
        """128-bit words of one channel's weights."""
        return ceil(self.inputs / self.lanes) if self.bits == 8 else self.sums * (GROUP // self.lanes)

    @property
    def scale_words(self) -> int:
        """128-bit words of one tile's scales on one port."""
        return ceil(self.tile * self.sums / (FLOATS_PER_WORD if self.bits == 8 else 2 * FLOATS_PER_WORD))

    @property
    def head_words(self) -> int:
        """128-bit words of one tile's scales and biases on one port."""
        return self.scale_words + (ceil(self.tile / FLOATS_PER_WORD) if self.bias else 0)

    @property
    def tile_words(self) -> int:
        """128-bit words of one tile's weights on one port."""
        return self.tile * self.channel_words

    @property
    def port_words(self) -> int:
        """128-bit words of this stage on one port."""
        return self.tiles * (self.head_words + self.tile_words)

    def scale_cycles(self, rows: int) -> int:
        """Clocks of scaling one tile's sums: one value per clock; groups before that, all ports and a row in four."""
        groups = 0 if self.bits == 8 else self.sums * max(self.tile * ceil(rows / row_lanes(rows)), ADD_LATENCY)
        return groups + self.tile * self.ports * rows

    def cycles(self, rows: int, finish: int) -> int:
        """Estimated clocks of the stage: its four processes overlap tile by tile, at the pace of the slowest.

        Args:
            rows: of one core. finish: clocks of the last process per tile.
        """
        steps = (self.head_words + self.tile_words, self.tile_words, self.scale_cycles(rows), finish)
        return (self.tiles - 1) * max(steps) + sum(steps)


def float_words(values: int) -> int:
    """128-bit words of float32 values; rows are moved and quantised a word's worth per clock."""
    return ceil(values / FLOATS_PER_WORD)


def row_lanes(rows: int) -> int:
    """Rows whose groups are scaled side by side (Stage::ROW_LANES)."""
    return ceil(rows / 4)


@dataclass(frozen=True)
class MlpDesign:
    """Everything the generated sources depend on.

    Args:
        ports: weight ports, each 128 bits per clock.
        gate_up: stage of gate and up; channel 2n is gate n, 2n + 1 is up n.
        down: stage of down.
        usage: estimated resources (not synthesised).
        tiles_in_uram: whether the weight tiles and the prefetch buffer are in UltraRAM instead of block RAM.
        prefetch_words: 128-bit words per port of the next layer's weights that fit on chip; 0: no buffer.
    """

    spec: MlpSpec
    budget: BoardBudget
    ports: int
    gate_up: StageShape
    down: StageShape
    usage: Usage
    tiles_in_uram: bool = False
    prefetch_words: int = 0

    @property
    def rows_per_core(self) -> int:
        """Rows that one core computes at the same time."""
        return ceil(self.spec.batch / self.spec.cores)

    @property
    def lanes(self) -> int:
        """int8 multiply-accumulates per clock, all cores together."""
        return self.ports * self.gate_up.lanes * self.rows_per_core * self.spec.cores

    @property
    def max_tile_words(self) -> int:
        """Most 128-bit words of one tile's weights on one port."""
        return max(self.gate_up.tile_words, self.down.tile_words)

    @property
    def port_words(self) -> int:
        """128-bit words of one layer that one port reads."""
        return self.gate_up.port_words + self.down.port_words

    @property
    def section_words(self) -> int:
        """128-bit words from one port's section to the next."""
        return ceil(self.port_words / SECTION_WORDS) * SECTION_WORDS

    @property
    def stream_bytes(self) -> int:
        """Bytes of one layer's weight stream, all ports."""
        return self.ports * self.section_words * WORD_BYTES

    @property
    def prefetch_bytes(self) -> int:
        """Bytes of the prefetch buffer, all ports."""
        return self.ports * self.prefetch_words * WORD_BYTES

    @property
    def row_words(self) -> int:
        """128-bit words of one float32 row."""
        return float_words(self.spec.hidden)

    @property
    def cycles(self) -> int:
        """Estimated clocks of a call in which some row computes; pipeline depths and memory latency are left out."""
        spec, rows = self.spec, self.rows_per_core
        quantise = 2 * rows * (float_words(spec.hidden) + float_words(spec.intermediate))
        move = 2 * rows * self.row_words
        neurons = self.gate_up.tile * self.ports // (2 if spec.gated else 1)
        gate_up = self.gate_up.cycles(rows, neurons * rows)
        return gate_up + self.down.cycles(rows, self.down.tile * self.ports * rows) + quantise + move

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest and the report."""
        return {
            "spec": asdict(self.spec),
            "budget": asdict(self.budget),
            "ports": self.ports,
            "gate_up": asdict(self.gate_up),
            "down": asdict(self.down),
            "tiles_in_uram": self.tiles_in_uram,
            "prefetch_words": self.prefetch_words,
            "lanes": self.lanes,
            "rows_per_core": self.rows_per_core,
            "stream_bytes": self.stream_bytes,
            "usage_estimate": asdict(self.usage),
            "cycles_estimate": self.cycles,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MlpDesign:
        """The inverse of `to_json`."""
        return cls(
            spec=MlpSpec(**data["spec"]),
            budget=BoardBudget(**data["budget"]),
            ports=data["ports"],
            gate_up=StageShape(**data["gate_up"]),
            down=StageShape(**data["down"]),
            usage=Usage(**data["usage_estimate"]),
            tiles_in_uram=data["tiles_in_uram"],
            prefetch_words=data["prefetch_words"],
        )


def choose_design(spec: MlpSpec, budget: BoardBudget) -> MlpDesign:
    """The design with the most weight ports that fits the budget, with the tiles that take the fewest clocks.

    Raises:
        CompileError: no kernel exists for the MLP, or nothing fits; the text has the numbers.
    """
    spec.check()
    if budget.axi_bits < WORD_BITS or budget.axi_ports < ROW_PORTS + 1:
        raise CompileError(
            f"{budget.part} has {budget.axi_ports} memory port(s) of {budget.axi_bits} bits; "
            f"the kernel needs {ROW_PORTS + 1} of {WORD_BITS}",
            hint="choose a board with more or wider memory ports",
        )
    tried = list(designs(spec, budget))
    if fitting := [d for d in tried if not excess(d)]:
        most = max(d.ports for d in fitting)
        return with_prefetch(min((d for d in fitting if d.ports == most), key=lambda d: d.cycles))
    least = tried[-1]
    raise CompileError(
        f"an MLP of {spec.hidden} / {spec.intermediate}, {spec.batch} row(s) on {spec.cores} core(s) does not fit "
        f"{budget.part}: {', '.join(excess(least))} (estimates, least design: 1 port, {least.lanes} lanes)",
        hint="use a larger board, a smaller batch or fewer cores",
    )


def with_prefetch(design: MlpDesign) -> MlpDesign:
    """The design with the longest prefetch buffer in half of the blocks that it leaves, at most a section.

    The other half is for what a design's own estimate leaves out: the controller's key buffer, and routing.
    """
    budget, usage, uram = design.budget, design.usage, design.tiles_in_uram
    left = (budget.uram - usage.uram if uram else budget.bram36 - usage.bram36) // 2
    for words in PREFETCH_WORD_CHOICES:
        blocks = design.ports * (uram_blocks if uram else bram_blocks)(WORD_BITS, words)
        if words <= design.port_words and blocks <= left:
            more = {"uram": usage.uram + blocks} if uram else {"bram36": usage.bram36 + blocks}
            return replace(design, prefetch_words=words, usage=replace(usage, **more))
    return design


def designs(spec: MlpSpec, budget: BoardBudget) -> Iterator[MlpDesign]:
    """Every design that the board has ports for, most ports and longest tiles first, whether or not it fits."""
    for ports in PORT_CHOICES:
        if ports + ROW_PORTS <= budget.axi_ports:
            if budget.uram:
                yield from (_design(spec, budget, ports, words, uram=True) for words in URAM_TILE_WORD_CHOICES)
            yield from (_design(spec, budget, ports, words) for words in TILE_WORD_CHOICES)


def excess(design: MlpDesign) -> list[str]:
    """One text per resource that the design needs more of than the budget has."""
    budget = design.budget
    return design.usage.over(budget.lut, budget.ff, budget.dsp, budget.bram36, budget.uram)


def _design(spec: MlpSpec, budget: BoardBudget, ports: int, words: int, *, uram: bool = False) -> MlpDesign:
    parts = 2 if spec.gated else 1
    first = StageShape(spec.hidden, parts * spec.intermediate, ports, 1, 1, spec.weight_bits, spec.up_bias)
    second = StageShape(spec.intermediate, spec.hidden, ports, 1, 1, spec.weight_bits, spec.down_bias)
    gate_up, down = cut_tiles(first, words, parts), cut_tiles(second, words, 1)
    return MlpDesign(spec, budget, ports, gate_up, down, _usage(spec, ports, gate_up, down, uram), uram)


def cut_tiles(stage: StageShape, words: int, parts: int) -> StageShape:
    """Tiles of about `words` words, all of one size, that hold whole sets of `parts` channels."""
    per_port = ceil(stage.channels / stage.ports)
    largest = max(1, words // stage.channel_words)
    tiles = ceil(per_port / largest)
    tile = ceil(per_port / tiles)
    if tile * stage.ports % parts:
        tile += 1
    return replace(stage, tile=tile, tiles=ceil(per_port / tile))


def _usage(spec: MlpSpec, ports: int, gate_up: StageShape, down: StageShape, uram: bool) -> Usage:
    rows = ceil(spec.batch / spec.cores)
    lanes = MAC_ARRAYS * ports * gate_up.lanes * rows * spec.cores
    stages = (gate_up, down)
    memories = [m for stage in stages for m in _stage_memories(stage, ports, rows)]
    tiles = [(2 * ports, WORD_BITS, stage.tile_words) for stage in stages]
    memories += [] if uram else tiles
    memories += [(rows * FLOATS_PER_WORD, 32, float_words(n)) for n in (spec.hidden, spec.intermediate, spec.hidden)]
    memories += [] if spec.activation == "relu" else [FACTOR_ROM]
    core_bram = sum(count * bram_blocks(bits, depth) for count, bits, depth in memories)
    core_lut_ram = sum(count * lut_ram(bits, depth) for count, bits, depth in memories)
    axi = ports + ROW_PORTS
    fifo_bram = ports * bram_blocks(WORD_BITS, 512)
    multiplies, adds = float_operators(spec, ports, rows)
    core_dsp = multiplies * resources.FLOAT_MULTIPLY_DSP + adds * resources.FLOAT_ADD_DSP
    core_dsp += 0 if spec.activation == "relu" else 2  # the table's blend: two products in integers
    core_lut = resources.CORE_LUT + core_lut_ram + (multiplies + adds) * resources.FLOAT_LUT
    core_ff = resources.CORE_FF + (multiplies + adds) * resources.FLOAT_FF
    return Usage(
        lut=lanes * resources.LANE_LUT + spec.cores * core_lut + axi * resources.PORT_LUT + resources.BASE_LUT,
        ff=lanes * resources.LANE_FF + spec.cores * core_ff + axi * resources.PORT_FF + resources.BASE_FF,
        dsp=spec.cores * (MAC_ARRAYS * gate_up.lanes * multipliers(rows, ports) + core_dsp),
        bram36=spec.cores * core_bram + axi * resources.PORT_BRAM + fifo_bram + resources.BASE_BRAM,
        uram=spec.cores * sum(n * uram_blocks(bits, depth) for n, bits, depth in tiles) if uram else 0,
    )


def multipliers(rows: int, ports: int) -> int:
    """DSP slices per lane of a word in one core: two products share one (fastcar_mac.hpp; AMD WP486)."""
    return ceil(rows * ports / 2)


def float_operators(spec: MlpSpec, ports: int, rows: int) -> tuple[int, int]:
    """(multipliers, adders) of float32 in one core, counted in the sources."""
    # Two stages: x * inverse and the rest of its rounding, four values at a time; the row's scale.
    quantise = (2 * (FLOATS_PER_WORD + 1), 2 * FLOATS_PER_WORD)
    activate = (1 if spec.activation != "relu" else 0) * 3 + (1 if spec.gated else 0)
    rounding = 1 if spec.activation != "relu" else 0
    biases = int(spec.up_bias) + int(spec.down_bias)
    groups = ports * row_lanes(rows)
    scale = (2 * 2, 0) if spec.weight_bits == 8 else (2 * (groups + 1), 2 * groups)
    return quantise[0] + activate + scale[0], quantise[1] + rounding + biases + scale[1]


def _stage_memories(stage: StageShape, ports: int, rows: int) -> list[tuple[int, int, int]]:
    """(copies, bits, depth) of one core's buffers for a stage but its tiles: sums and values twice, heads three times,
    group totals and inputs once."""
    totals = [] if stage.bits == 8 else [(ports * rows, 32, stage.tile)]
    return [
        (3 * ports, WORD_BITS, stage.head_words),
        (2 * ports * rows, 32, stage.tile * stage.sums),
        (2 * ports * rows, 32, stage.tile),
        (rows, 8 * stage.lanes, stage.channel_words),
        *totals,
    ]
