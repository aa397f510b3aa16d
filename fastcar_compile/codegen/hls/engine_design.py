"""Choose lanes, ports and tiles of the engine, which computes MLPs and linears on one MAC array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import ceil, gcd
from typing import Any

from fastcar_compile.codegen.hls import resources
from fastcar_compile.codegen.hls.design import (
    FACTOR_ROM,
    FLOATS_PER_WORD,
    PORT_CHOICES,
    ROW_PORTS,
    SECTION_WORDS,
    TILE_WORD_CHOICES,
    URAM_TILE_WORD_CHOICES,
    WORD_BITS,
    WORD_BYTES,
    MlpDesign,
    StageShape,
    float_words,
    multipliers,
    row_lanes,
    with_prefetch,
)
from fastcar_compile.codegen.hls.linear_spec import EngineSpec, LinearSpec
from fastcar_compile.codegen.hls.resources import Usage, bram_blocks, lut_ram, uram_blocks
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec
from fastcar_compile.errors import CompileError

CONTROL_LUT, CONTROL_FF, CONTROL_DSP = 1_500, 1_500, 6
"""Loop bounds at run time: the products of small integers in every process of one core, and of the top. Estimate."""


@dataclass(frozen=True)
class LinearStage(StageShape):
    """The one matrix product of a linear call, and its weight stream."""

    @property
    def section_words(self) -> int:
        """128-bit words from one port's section to the next."""
        return ceil(self.port_words / SECTION_WORDS) * SECTION_WORDS

    @property
    def stream_bytes(self) -> int:
        """Bytes of the weight stream, all ports."""
        return self.ports * self.section_words * WORD_BYTES


@dataclass(frozen=True)
class EngineDesign:
    """Everything that the generated sources of the engine depend on.

    Args:
        mlp: stages and weight stream of the MLP; its usage is the engine's.
        linears: name -> product, in call order.
    """

    mlp: MlpDesign
    linears: dict[str, LinearStage]

    @property
    def usage(self) -> Usage:
        """Estimated resources of the whole engine (not synthesised)."""
        return self.mlp.usage

    @property
    def max_inputs(self) -> int:
        """Inputs of the widest product: floats and int8 values that a core keeps of one row."""
        return max(s.inputs for s in self._stages())

    @property
    def max_tile(self) -> int:
        """Most rows of one tile on one port."""
        return max(s.tile for s in self._stages())

    @property
    def max_tile_words(self) -> int:
        """Most 128-bit words of one tile's weights on one port."""
        return max(s.tile_words for s in self._stages())

    @property
    def max_tile_sums(self) -> int:
        """Most int32 sums of one tile on one port."""
        return max(s.tile * s.sums for s in self._stages())

    @property
    def max_head_words(self) -> int:
        """Most 128-bit words of one tile's scales and biases on one port; there is always room for biases."""
        return max(replace(s, bias=True).head_words for s in self._stages())

    @property
    def max_channel_words(self) -> int:
        """Most 128-bit words of one channel's weights."""
        return max(s.channel_words for s in self._stages())

    @property
    def max_section_words(self) -> int:
        """Most 128-bit words of one port's section."""
        return max([self.mlp.section_words, *(s.section_words for s in self.linears.values())])

    @property
    def max_row_words(self) -> int:
        """128-bit words of the longest float32 row in or out."""
        longest = max([self.mlp.spec.hidden, *(max(s.inputs, s.channels) for s in self.linears.values())])
        return float_words(longest)

    def shapes(self) -> list[LinearStage]:
        """One unbiased product per distinct shape, for the test bench."""
        return list(dict.fromkeys(replace(s, bias=False) for s in self.linears.values()))

    @property
    def mlp_cycles(self) -> int:
        """Estimated clocks of an MLP call in which some row computes, under the same terms as `cycles`."""
        mlp = self.mlp
        moved = mlp.rows_per_core * mlp.row_words
        return moved + sum(self._product_cycles(stage) for stage in (mlp.gate_up, mlp.down))

    def cycles(self, name: str) -> int:
        """Estimated clocks of one linear call; pipeline depths and memory latency are left out."""
        stage = self.linears[name]
        return self._product_cycles(stage) + self.mlp.rows_per_core * float_words(stage.inputs)

    def _product_cycles(self, stage: StageShape) -> int:
        """Two passes that quantise, then the stage's processes, and sending, which takes no longer than finishing."""
        rows = self.mlp.rows_per_core
        finish = stage.tile * stage.ports * rows
        return 2 * rows * float_words(stage.inputs) + stage.cycles(rows, finish) + finish

    def fit(self, linear: LinearSpec) -> LinearStage:
        """A product for any linear on this very engine: its tiles are as long as the buffers allow.

        Raises:
            CompileError: the buffers are too small for it.
        """
        stage = _bare(linear, self.mlp.ports, self.mlp.spec.weight_bits)
        step = _step(stage.ports)
        rows = [self.max_tile, self.max_tile_words // stage.channel_words, self.max_tile_sums // stage.sums]
        largest = min(rows) // step * step
        while largest and replace(stage, tile=largest, bias=True).head_words > self.max_head_words:
            largest -= step
        if linear.inputs > self.max_inputs or not largest:
            raise CompileError(
                f"{linear.name} has {linear.inputs} inputs; the engine's buffers hold {self.max_inputs}, "
                f"and tiles of {self.max_tile_words} words per port",
                hint="choose the design again with this linear",
            )
        return _cut(stage, largest)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest and the report."""
        return self.mlp.to_json() | {
            "cycles_estimate": self.mlp_cycles,
            "linears": {name: asdict(stage) for name, stage in self.linears.items()},
            "linear_stream_bytes": {name: stage.stream_bytes for name, stage in self.linears.items()},
            "linear_cycles_estimate": {name: self.cycles(name) for name in self.linears},
            "buffers": {
                "inputs": self.max_inputs,
                "tile": self.max_tile,
                "tile_words": self.max_tile_words,
                "tile_sums": self.max_tile_sums,
                "head_words": self.max_head_words,
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineDesign:
        """The inverse of `to_json`."""
        stages = {name: LinearStage(**data[name]) for name in ("gate_up", "down")}
        linears = {name: LinearStage(**stage) for name, stage in data["linears"].items()}
        return cls(replace(MlpDesign.from_json(data), **stages), linears)

    def _stages(self) -> list[StageShape]:
        return [self.mlp.gate_up, self.mlp.down, *self.linears.values()]


def choose_engine(spec: EngineSpec, budget: BoardBudget) -> EngineDesign:
    """The design with the most weight ports that fits the budget, with the tiles that take the fewest clocks.

    Buffers are those of the largest product; the lanes serve all of them.

    Raises:
        CompileError: no engine exists for the MLP or a linear, or nothing fits; the text has the numbers.
    """
    spec.check()
    if budget.axi_bits < WORD_BITS or budget.axi_ports < ROW_PORTS + 1:
        raise CompileError(
            f"{budget.part} has {budget.axi_ports} memory port(s) of {budget.axi_bits} bits; "
            f"the engine needs {ROW_PORTS + 1} of {WORD_BITS}",
            hint="choose a board with more or wider memory ports",
        )
    tried: list[EngineDesign] = []
    for _ports, group in groupby(engines(spec, budget), key=lambda d: d.mlp.ports):
        tried = list(group)
        if fitting := [d for d in tried if not excess(d)]:
            best = min(fitting, key=_forward_cycles)
            return replace(best, mlp=with_prefetch(best.mlp))
    mlp, least = spec.mlp, tried[-1]
    widest = max(spec.linears, key=lambda linear: linear.inputs, default=None)
    also = f" and linears of up to {widest.inputs} inputs ({widest.name})" if widest else ""
    raise CompileError(
        f"an engine for an MLP of {mlp.hidden} / {mlp.intermediate}{also}, {mlp.batch} row(s) on {mlp.cores} core(s) "
        f"does not fit {budget.part}: {', '.join(excess(least))} (estimates, least design: 1 port, "
        f"{least.mlp.lanes} lanes)",
        hint="use a larger board, a smaller batch or offload='mlp'",
    )


def engines(spec: EngineSpec, budget: BoardBudget) -> Iterator[EngineDesign]:
    """Every design that the board has ports for, most ports and longest tiles first, whether or not it fits."""
    for ports in PORT_CHOICES:
        if ports + ROW_PORTS <= budget.axi_ports:
            if budget.uram:
                yield from (_design(spec, budget, ports, words, uram=True) for words in URAM_TILE_WORD_CHOICES)
            yield from (_design(spec, budget, ports, words) for words in TILE_WORD_CHOICES)


def excess(design: EngineDesign) -> list[str]:
    """One text per resource that the design needs more of than the budget has."""
    budget = design.mlp.budget
    return design.usage.over(budget.lut, budget.ff, budget.dsp, budget.bram36, budget.uram)


def _forward_cycles(design: EngineDesign) -> int:
    """Clocks of a forward in which every MLP computes."""
    return design.mlp.spec.layers * design.mlp_cycles + sum(design.cycles(name) for name in design.linears)


def _design(spec: EngineSpec, budget: BoardBudget, ports: int, words: int, *, uram: bool = False) -> EngineDesign:
    mlp = spec.mlp
    parts, bits = 2 if mlp.gated else 1, mlp.weight_bits
    first = LinearSpec("gate/up", mlp.hidden, parts * mlp.intermediate, mlp.up_bias)
    second = LinearSpec("down", mlp.intermediate, mlp.hidden, mlp.down_bias)
    gate_up, down, *others = (_stage(linear, ports, bits, words) for linear in (first, second, *spec.linears))
    linears = {linear.name: stage for linear, stage in zip(spec.linears, others, strict=True)}
    bare = EngineDesign(MlpDesign(mlp, budget, ports, gate_up, down, Usage(0, 0, 0, 0), uram), linears)
    return EngineDesign(replace(bare.mlp, usage=_usage(bare)), linears)


def _bare(linear: LinearSpec, ports: int, bits: int) -> LinearStage:
    return LinearStage(linear.inputs, linear.channels, ports, 1, 1, bits, linear.biased)


def _step(ports: int) -> int:
    """Rows of a tile per port come in steps: the channels of a tile are whole float32 words (and pairs)."""
    return FLOATS_PER_WORD // gcd(FLOATS_PER_WORD, ports)


def _stage(linear: LinearSpec, ports: int, bits: int, words: int) -> LinearStage:
    """Tiles of about `words` words, all of one size."""
    stage, step = _bare(linear, ports, bits), _step(ports)
    return _cut(stage, max(step, words // stage.channel_words // step * step))


def _cut(stage: LinearStage, largest: int) -> LinearStage:
    """The fewest equal tiles of at most `largest` rows per port, a multiple of the step."""
    per_port, step = ceil(stage.channels / stage.ports), _step(stage.ports)
    tile = ceil(ceil(per_port / ceil(per_port / largest)) / step) * step
    return replace(stage, tile=tile, tiles=ceil(per_port / tile))


def _usage(design: EngineDesign) -> Usage:
    """As for the MLP kernel, with one product instead of two in hardware."""
    spec, ports, rows = design.mlp.spec, design.mlp.ports, design.mlp.rows_per_core
    tiles, uram = (2 * ports, WORD_BITS, design.max_tile_words), design.mlp.tiles_in_uram
    memories = _memories(design, ports, rows) + ([] if uram else [tiles])
    core_bram = sum(count * bram_blocks(bits, depth) for count, bits, depth in memories)
    core_lut_ram = sum(count * lut_ram(bits, depth) for count, bits, depth in memories)
    lanes, axi = design.mlp.lanes, ports + ROW_PORTS
    multiplies, adds = _float_operators(spec, ports, rows)
    operators = multiplies + adds
    core_dsp = multiplies * resources.FLOAT_MULTIPLY_DSP + adds * resources.FLOAT_ADD_DSP + CONTROL_DSP
    core_dsp += 0 if spec.activation == "relu" else 2  # the table's blend: two products in integers
    core_lut = resources.CORE_LUT + CONTROL_LUT + core_lut_ram + operators * resources.FLOAT_LUT
    core_ff = resources.CORE_FF + CONTROL_FF + operators * resources.FLOAT_FF
    word_lanes = design.mlp.gate_up.lanes
    return Usage(
        lut=lanes * resources.LANE_LUT
        + spec.cores * core_lut
        + axi * resources.PORT_LUT
        + resources.BASE_LUT
        + CONTROL_LUT,
        ff=lanes * resources.LANE_FF + spec.cores * core_ff + axi * resources.PORT_FF + resources.BASE_FF + CONTROL_FF,
        dsp=spec.cores * (word_lanes * multipliers(rows, ports) + core_dsp) + CONTROL_DSP,
        bram36=spec.cores * core_bram
        + axi * resources.PORT_BRAM
        + ports * bram_blocks(WORD_BITS, 512)
        + resources.BASE_BRAM,
        uram=spec.cores * tiles[0] * uram_blocks(*tiles[1:]) if uram else 0,
    )


def _float_operators(spec: MlpSpec, ports: int, rows: int) -> tuple[int, int]:
    """(multipliers, adders) of float32 in one core, counted in the sources."""
    table = spec.activation != "relu"
    activate = (3 if table else 0) + (1 if spec.gated else 0)
    groups = ports * row_lanes(rows)
    scale = (2, 0) if spec.weight_bits == 8 else (groups + 1, groups)
    # x * inverse and the rest of its rounding, four values at a time; the row's scale; a bias.
    return FLOATS_PER_WORD + 1 + activate + scale[0], FLOATS_PER_WORD + int(table) + 1 + scale[1]


def _memories(design: EngineDesign, ports: int, rows: int) -> list[tuple[int, int, int]]:
    """(copies, bits, depth) of one core's buffers but its tiles: sums, values and results twice, heads three times, rows
    and group totals once."""
    spec = design.mlp.spec
    return [
        (3 * ports, WORD_BITS, design.max_head_words),
        (2 * ports * rows, 32, design.max_tile_sums),
        (2 * ports * rows, 32, design.max_tile),
        (2, WORD_BITS, rows * ceil(design.max_tile * ports / FLOATS_PER_WORD)),
        (rows, 8 * design.mlp.gate_up.lanes, design.max_channel_words),
        (FLOATS_PER_WORD, 32, rows * float_words(design.max_inputs)),
        *([] if spec.weight_bits == 8 else [(ports * rows, 32, design.max_tile)]),
        *([] if spec.activation == "relu" else [FACTOR_ROM]),
    ]
