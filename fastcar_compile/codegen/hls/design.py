"""Choose lanes, ports and tiles of the MLP kernel within a board's budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from fastcar_compile.codegen.hls import resources
from fastcar_compile.codegen.hls.resources import Usage, bram_blocks, lut_ram
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec
from fastcar_compile.errors import CompileError

WORD_BITS, WORD_BYTES, FLOATS_PER_WORD = 128, 16, 4
SIGMOID_ROM = (1, 32, 513)
"""Copies, bits and depth of the sigmoid table, one per core."""

ROW_PORTS = 2
"""AXI ports besides the weights: one reads x, one reads the cached rows and writes y."""

PORT_CHOICES = (8, 4, 2, 1)
TILE_WORD_CHOICES = (512, 256, 128, 64)
"""Words of one tile on one port: a long burst and one BRAM depth first, then smaller."""


@dataclass(frozen=True)
class StageShape:
    """One matrix product: `channels` outputs of `inputs` int8 values, cut into tiles.

    Channel (t * tile + j) * ports + p is row j of tile t on weight port p.
    """

    inputs: int
    channels: int
    ports: int
    tile: int
    tiles: int

    @property
    def channel_words(self) -> int:
        """128-bit words of one channel's weights."""
        return ceil(self.inputs / WORD_BYTES)

    @property
    def scale_words(self) -> int:
        """128-bit words of one tile's float32 scales on one port."""
        return ceil(self.tile / FLOATS_PER_WORD)

    @property
    def port_words(self) -> int:
        """128-bit words of this stage on one port."""
        return self.tiles * (self.scale_words + self.tile * self.channel_words)

    def cycles(self, finish: int) -> int:
        """Estimated clocks of the stage: fetch, multiply and finish (`finish` clocks per tile) overlap tile by tile."""
        multiply = self.tile * self.channel_words
        return self.tiles * max(self.scale_words + multiply, finish) + multiply + finish


@dataclass(frozen=True)
class MlpDesign:
    """Everything the generated sources depend on.

    Args:
        ports: weight ports, each 128 bits per clock.
        gate_up: stage of gate and up; channel 2n is gate n, 2n + 1 is up n.
        down: stage of down.
        usage: estimated resources (not synthesised).
    """

    spec: MlpSpec
    budget: BoardBudget
    ports: int
    gate_up: StageShape
    down: StageShape
    usage: Usage

    @property
    def rows_per_core(self) -> int:
        """Rows that one core computes at the same time."""
        return ceil(self.spec.batch / self.spec.cores)

    @property
    def lanes(self) -> int:
        """int8 multiply-accumulates per clock, all cores together."""
        return self.ports * WORD_BYTES * self.rows_per_core * self.spec.cores

    @property
    def port_words(self) -> int:
        """128-bit words of one layer on one port."""
        return self.gate_up.port_words + self.down.port_words

    @property
    def stream_bytes(self) -> int:
        """Bytes of one layer's weight stream, all ports."""
        return self.ports * self.port_words * WORD_BYTES

    @property
    def row_words(self) -> int:
        """128-bit words of one float32 row."""
        return ceil(self.spec.hidden / FLOATS_PER_WORD)

    @property
    def cycles(self) -> int:
        """Estimated clocks of a call in which some row computes; pipeline depths and memory latency are left out."""
        spec, rows = self.spec, self.rows_per_core
        quantise = 2 * rows * (spec.hidden + spec.intermediate)
        move = 2 * rows * spec.hidden
        gate_up = self.gate_up.cycles(self.gate_up.tile * self.ports // 2 * rows)
        return gate_up + self.down.cycles(self.down.tile * self.ports * rows) + quantise + move

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest and the report."""
        return {
            "spec": asdict(self.spec),
            "budget": asdict(self.budget),
            "ports": self.ports,
            "gate_up": asdict(self.gate_up),
            "down": asdict(self.down),
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
        )


def choose_design(spec: MlpSpec, budget: BoardBudget) -> MlpDesign:
    """The design with the most weight ports, then the longest tiles, that fits the budget.

    Raises:
        CompileError: no kernel exists for the MLP, or nothing fits; the text has the numbers.
    """
    spec.check()
    if budget.axi_bits < WORD_BITS or budget.axi_ports < ROW_PORTS + 1:
        raise CompileError(
            f"{budget.part} has {budget.axi_ports} memory port(s) of {budget.axi_bits} bits; "
            f"the kernel needs {ROW_PORTS + 1} of {WORD_BITS}",
            mend="choose a board with more or wider memory ports",
        )
    tried: MlpDesign | None = None
    for tried in designs(spec, budget):
        if not excess(tried):
            return tried
    assert tried is not None
    raise CompileError(
        f"an MLP of {spec.hidden} / {spec.intermediate}, {spec.batch} row(s) on {spec.cores} core(s) does not fit "
        f"{budget.part}: {', '.join(excess(tried))} (estimates, least design: 1 port, {tried.lanes} lanes)",
        mend="use a larger board, a smaller batch or fewer cores",
    )


def designs(spec: MlpSpec, budget: BoardBudget) -> Iterator[MlpDesign]:
    """Every design that the board has ports for, most ports and longest tiles first, whether or not it fits."""
    for ports in PORT_CHOICES:
        if ports + ROW_PORTS <= budget.axi_ports:
            yield from (_design(spec, budget, ports, words) for words in TILE_WORD_CHOICES)


def excess(design: MlpDesign) -> list[str]:
    """One text per resource that the design needs more of than the budget has."""
    budget = design.budget
    return design.usage.over(budget.lut, budget.ff, budget.dsp, budget.bram36)


def _design(spec: MlpSpec, budget: BoardBudget, ports: int, words: int) -> MlpDesign:
    gate_up = _stage(spec.hidden, 2 * spec.intermediate, ports, words, even=True)
    down = _stage(spec.intermediate, spec.hidden, ports, words, even=False)
    return MlpDesign(spec, budget, ports, gate_up, down, _usage(spec, ports, gate_up, down))


def _stage(inputs: int, channels: int, ports: int, words: int, *, even: bool) -> StageShape:
    """Tiles of about `words` words, all of one size; `even`: a tile holds whole pairs of channels."""
    per_port = ceil(channels / ports)
    largest = max(1, words // ceil(inputs / WORD_BYTES))
    tiles = ceil(per_port / largest)
    tile = ceil(per_port / tiles)
    if even and tile * ports % 2:
        tile += 1
    return StageShape(inputs, channels, ports, tile, ceil(per_port / tile))


def _usage(spec: MlpSpec, ports: int, gate_up: StageShape, down: StageShape) -> Usage:
    rows = ceil(spec.batch / spec.cores)
    lanes = ports * WORD_BYTES * rows * spec.cores
    memories = [m for stage in (gate_up, down) for m in _stage_memories(stage, ports, rows)]
    memories += [(rows, 32, spec.hidden), (rows, 32, spec.intermediate), (rows, 32, spec.hidden), SIGMOID_ROM]
    core_bram = sum(count * bram_blocks(bits, depth) for count, bits, depth in memories)
    core_lut_ram = sum(count * lut_ram(bits, depth) for count, bits, depth in memories)
    axi = ports + ROW_PORTS
    fifo_bram = ports * bram_blocks(WORD_BITS, 512)
    return Usage(
        lut=lanes * resources.LANE_LUT
        + spec.cores * (resources.CORE_LUT + core_lut_ram)
        + axi * resources.PORT_LUT
        + resources.BASE_LUT,
        ff=lanes * resources.LANE_FF + spec.cores * resources.CORE_FF + axi * resources.PORT_FF + resources.BASE_FF,
        dsp=lanes + spec.cores * resources.CORE_DSP,
        bram36=spec.cores * core_bram + axi * resources.PORT_BRAM + fifo_bram + resources.BASE_BRAM,
    )


def _stage_memories(stage: StageShape, ports: int, rows: int) -> list[tuple[int, int, int]]:
    """(copies, bits, depth) of one core's buffers for a stage: tiles and sums twice, scales three times, inputs once."""
    return [
        (2 * ports, WORD_BITS, stage.tile * stage.channel_words),
        (3 * ports, WORD_BITS, stage.scale_words),
        (2 * ports * rows, 32, stage.tile),
        (rows, WORD_BITS, stage.channel_words),
    ]
