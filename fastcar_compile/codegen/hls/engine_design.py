"""Choose lanes, ports and tiles of the engine, which computes MLPs and linears on one MAC array."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil, gcd
from typing import Any

from fastcar_compile.codegen.hls import resources
from fastcar_compile.codegen.hls.design import (
    FLOATS_PER_WORD,
    PORT_CHOICES,
    ROW_PORTS,
    SIGMOID_ROM,
    TILE_WORD_CHOICES,
    WORD_BITS,
    WORD_BYTES,
    MlpDesign,
    StageShape,
)
from fastcar_compile.codegen.hls.linear_spec import EngineSpec, LinearSpec
from fastcar_compile.codegen.hls.resources import Usage, bram_blocks, lut_ram
from fastcar_compile.codegen.hls.spec import BoardBudget
from fastcar_compile.errors import CompileError

CONTROL_LUT, CONTROL_FF, CONTROL_DSP = 1_500, 1_500, 6
"""Loop bounds at run time: the products of small integers in every process of one core, and of the top. Estimate."""


@dataclass(frozen=True)
class LinearStage(StageShape):
    """A matrix product whose tiles may carry biases after the scales."""

    biased: bool = False

    @property
    def header_words(self) -> int:
        """128-bit words of one tile's scales and biases on one port."""
        return self.scale_words * (2 if self.biased else 1)

    @property
    def port_words(self) -> int:
        """128-bit words of this product on one port."""
        return self.tiles * (self.header_words + self.tile * self.channel_words)

    @property
    def stream_bytes(self) -> int:
        """Bytes of the weight stream, all ports."""
        return self.ports * self.port_words * WORD_BYTES


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
        """Most 128-bit words of one tile on one port."""
        return max(s.tile * s.channel_words for s in self._stages())

    @property
    def max_port_words(self) -> int:
        """Most 128-bit words that one port reads in a call."""
        return max([self.mlp.port_words, *(s.port_words for s in self.linears.values())])

    @property
    def max_row_words(self) -> int:
        """128-bit words of the longest float32 row in or out."""
        longest = max([self.mlp.spec.hidden, *(max(s.inputs, s.channels) for s in self.linears.values())])
        return ceil(longest / FLOATS_PER_WORD)

    def shapes(self) -> list[LinearStage]:
        """One unbiased product per distinct shape, for the test bench."""
        return list(dict.fromkeys(replace(s, biased=False) for s in self.linears.values()))

    @property
    def mlp_cycles(self) -> int:
        """Estimated clocks of an MLP call in which some row computes, under the same terms as `cycles`."""
        mlp = self.mlp
        products = self._product_cycles(mlp.gate_up, mlp.gate_up.scale_words)
        products += self._product_cycles(mlp.down, mlp.down.scale_words)
        return products + mlp.rows_per_core * mlp.spec.hidden

    def cycles(self, name: str) -> int:
        """Estimated clocks of one linear call; pipeline depths and memory latency are left out."""
        stage = self.linears[name]
        return self._product_cycles(stage, stage.header_words) + self.mlp.rows_per_core * stage.inputs

    def _product_cycles(self, stage: StageShape, header: int) -> int:
        """Two passes that quantise, then fetch, multiply, finish and send, which overlap tile by tile."""
        rows, multiply = self.mlp.rows_per_core, stage.tile * stage.channel_words
        finish = stage.tile * stage.ports * rows
        return 2 * rows * stage.inputs + stage.tiles * max(header + multiply, finish) + multiply + 2 * finish

    def fit(self, linear: LinearSpec) -> LinearStage:
        """A product for any linear on this very engine: its tiles are as long as the buffers allow.

        Raises:
            CompileError: the buffers are too small for it.
        """
        ports, words = self.mlp.ports, ceil(linear.inputs / WORD_BYTES)
        step = FLOATS_PER_WORD // gcd(FLOATS_PER_WORD, ports)
        largest = min(self.max_tile, self.max_tile_words // words) // step * step
        if linear.inputs > self.max_inputs or not largest:
            raise CompileError(
                f"{linear.name} has {linear.inputs} inputs; the engine's buffers hold {self.max_inputs}, "
                f"and tiles of {self.max_tile_words} words per port",
                mend="choose the design again with this linear",
            )
        shape = _cut(linear.inputs, linear.channels, ports, largest, step)
        return LinearStage(**asdict(shape), biased=linear.biased)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest and the report."""
        return self.mlp.to_json() | {
            "cycles_estimate": self.mlp_cycles,
            "linears": {name: asdict(stage) for name, stage in self.linears.items()},
            "linear_stream_bytes": {name: stage.stream_bytes for name, stage in self.linears.items()},
            "linear_cycles_estimate": {name: self.cycles(name) for name in self.linears},
            "buffers": {"inputs": self.max_inputs, "tile": self.max_tile, "tile_words": self.max_tile_words},
        }

    def _stages(self) -> list[StageShape]:
        return [self.mlp.gate_up, self.mlp.down, *self.linears.values()]


def choose_engine(spec: EngineSpec, budget: BoardBudget) -> EngineDesign:
    """The design with the most weight ports, then the longest tiles, that fits the budget.

    Buffers are those of the largest product; the lanes serve all of them.

    Raises:
        CompileError: no engine exists for the MLP or a linear, or nothing fits; the text has the numbers.
    """
    spec.check()
    if budget.axi_bits < WORD_BITS or budget.axi_ports < ROW_PORTS + 1:
        raise CompileError(
            f"{budget.part} has {budget.axi_ports} memory port(s) of {budget.axi_bits} bits; "
            f"the engine needs {ROW_PORTS + 1} of {WORD_BITS}",
            mend="choose a board with more or wider memory ports",
        )
    tried: EngineDesign | None = None
    for ports in PORT_CHOICES:
        if ports + ROW_PORTS > budget.axi_ports:
            continue
        for words in TILE_WORD_CHOICES:
            tried = _design(spec, budget, ports, words)
            if not _excess(tried):
                return tried
    assert tried is not None
    mlp = spec.mlp
    widest = max(spec.linears, key=lambda linear: linear.inputs, default=None)
    also = f" and linears of up to {widest.inputs} inputs ({widest.name})" if widest else ""
    raise CompileError(
        f"an engine for an MLP of {mlp.hidden} / {mlp.intermediate}{also}, {mlp.batch} row(s) on {mlp.cores} core(s) "
        f"does not fit {budget.part}: {', '.join(_excess(tried))} (estimates, least design: 1 port, "
        f"{tried.mlp.lanes} lanes)",
        mend="use a larger board, a smaller batch or offload='mlp'",
    )


def _excess(design: EngineDesign) -> list[str]:
    budget = design.mlp.budget
    return design.usage.over(budget.lut, budget.ff, budget.dsp, budget.bram36)


def _design(spec: EngineSpec, budget: BoardBudget, ports: int, words: int) -> EngineDesign:
    mlp = spec.mlp
    gate_up = _stage(mlp.hidden, 2 * mlp.intermediate, ports, words)
    down = _stage(mlp.intermediate, mlp.hidden, ports, words)
    linears = {linear.name: _linear_stage(linear, ports, words) for linear in spec.linears}
    bare = EngineDesign(MlpDesign(mlp, budget, ports, gate_up, down, Usage(0, 0, 0, 0)), linears)
    return EngineDesign(replace(bare.mlp, usage=_usage(bare)), linears)


def _linear_stage(linear: LinearSpec, ports: int, words: int) -> LinearStage:
    shape = _stage(linear.inputs, linear.channels, ports, words)
    return LinearStage(**asdict(shape), biased=linear.biased)


def _stage(inputs: int, channels: int, ports: int, words: int) -> StageShape:
    """Tiles of about `words` words, all of one size; the channels of a tile are whole float32 words (and pairs)."""
    step = FLOATS_PER_WORD // gcd(FLOATS_PER_WORD, ports)
    largest = max(step, words // ceil(inputs / WORD_BYTES) // step * step)
    return _cut(inputs, channels, ports, largest, step)


def _cut(inputs: int, channels: int, ports: int, largest: int, step: int) -> StageShape:
    """The fewest equal tiles of at most `largest` rows per port, which is a multiple of `step`."""
    per_port = ceil(channels / ports)
    tile = ceil(ceil(per_port / ceil(per_port / largest)) / step) * step
    return StageShape(inputs, channels, ports, tile, ceil(per_port / tile))


def _usage(design: EngineDesign) -> Usage:
    spec, ports, rows = design.mlp.spec, design.mlp.ports, design.mlp.rows_per_core
    memories = _memories(design, ports, rows)
    core_bram = sum(count * bram_blocks(bits, depth) for count, bits, depth in memories)
    core_lut_ram = sum(count * lut_ram(bits, depth) for count, bits, depth in memories)
    lanes, axi = design.mlp.lanes, ports + ROW_PORTS
    fifo_bram = ports * bram_blocks(WORD_BITS, 512)
    return Usage(
        lut=lanes * resources.LANE_LUT
        + spec.cores * (resources.CORE_LUT + CONTROL_LUT + core_lut_ram)
        + axi * resources.PORT_LUT
        + resources.BASE_LUT
        + CONTROL_LUT,
        ff=lanes * resources.LANE_FF
        + spec.cores * (resources.CORE_FF + CONTROL_FF)
        + axi * resources.PORT_FF
        + resources.BASE_FF
        + CONTROL_FF,
        dsp=lanes + spec.cores * (resources.CORE_DSP + CONTROL_DSP) + CONTROL_DSP,
        bram36=spec.cores * core_bram + axi * resources.PORT_BRAM + fifo_bram + resources.BASE_BRAM,
    )


def _memories(design: EngineDesign, ports: int, rows: int) -> list[tuple[int, int, int]]:
    """(copies, bits, depth) of one core's buffers: tiles, sums and results twice, headers three times, a row once."""
    return [
        (2 * ports, WORD_BITS, design.max_tile_words),
        (3 * ports, WORD_BITS, 2 * ceil(design.max_tile / FLOATS_PER_WORD)),
        (2 * ports * rows, 32, design.max_tile),
        (2, WORD_BITS, rows * ceil(design.max_tile * ports / FLOATS_PER_WORD)),
        (rows, WORD_BITS, ceil(design.max_inputs / WORD_BYTES)),
        (1, 32, rows * design.max_inputs),
        SIGMOID_ROM,
    ]
