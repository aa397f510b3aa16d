"""Time of the emitted compute engine: cycles from its loop structure, bytes from its weight stream.

The structure is that of hls_templates/fastcar_mlp_processes.hpp: rows are loaded and quantised, then tiles are fetched,
multiplied and finished in a three-deep pipeline, then rows are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from fastcar_compile.codegen.hls.design import WORD_BYTES, MlpDesign, StageShape, cut_tiles, float_words
from fastcar_compile.codegen.hls.engine_design import EngineDesign
from fastcar_compile.codegen.hls.spec import WEIGHT_BITS
from fastcar_compile.estimate.dram import timing_of
from fastcar_compile.estimate.shapes import LinearShape
from fastcar_compile.targets import Target

BURST_BYTES = 4096
"""Bytes of one read request of a weight port: the longest AXI4 burst, 256 beats of 128 bits, is also the 4 KiB page."""

FIFO_WORDS = 512
"""Words that each weight port's FIFO holds (FASTCAR_FIFO(ports, 512))."""


@dataclass(frozen=True)
class Engine:
    """The engine of one design on one board.

    Args:
        memory_rate: bytes per second that the weight memories deliver to the engine's ports.
        fifo_bytes: weights that the ports' FIFOs take before the first product starts.
        prefetch_bytes: weights of the next layer that the prefetch buffer holds.
        side_by_side: whether a core multiplies its rows at the same time (as emitted) or one after another.
    """

    clock_hz: float
    ports: int
    cores: int
    rows: int
    tile_words: int
    memory_rate: float
    fifo_bytes: int
    prefetch_bytes: int
    side_by_side: bool = True

    @classmethod
    def of(cls, design: MlpDesign | EngineDesign, target: Target) -> Engine:
        """The engine of an emitted design."""
        whole, design = design, design.mlp if isinstance(design, EngineDesign) else design
        return cls(
            clock_hz=design.budget.clock_mhz * 1e6,
            ports=design.ports,
            cores=design.spec.cores,
            rows=design.spec.batch,
            tile_words=whole.max_tile_words,
            memory_rate=memory_rate(target, design.ports),
            fifo_bytes=design.ports * FIFO_WORDS * WORD_BYTES,
            prefetch_bytes=design.prefetch_bytes,
        )

    def one_row_after_another(self) -> Engine:
        """The same engine with cores that multiply one row at a time, from tiles that stay on chip."""
        return replace(self, side_by_side=False)

    @property
    def port_rate(self) -> float:
        """Bytes per second that the weight ports can take: 16 bytes per clock each."""
        return self.ports * WORD_BYTES * self.clock_hz

    @property
    def stream_rate(self) -> float:
        """Bytes per second of an undisturbed weight stream."""
        return min(self.port_rate, self.memory_rate)

    def load(self, replayed: tuple[bool, ...], *, drs: bool) -> int:
        """Rows of the core that has most to compute: round-robin over those that compute (DRS), or fixed row mod C."""
        computing = [row for row, replays in enumerate(replayed) if not replays]
        if drs:
            return ceil(len(computing) / self.cores)
        return max((sum(row % self.cores == core for row in computing) for core in range(self.cores)), default=0)

    def stream_seconds(self, linear: LinearShape, quant: str, load: int) -> tuple[float, str]:
        """Time of the tile pipeline and what bounds it: "memory", "ports" or "compute"."""
        return _stream_seconds(self, linear, quant, load)

    def edge_seconds(self, inputs: int, outputs: int, load: int, *, between: int = 0) -> float:
        """Time outside the tile pipeline: load a row, find its maximum, quantise it, store it; four values a clock.

        Args:
            between: values that are quantised between two products of one call (the MLP's activations).
        """
        words = 3 * float_words(inputs) + 2 * float_words(between) + float_words(outputs)
        return load * words / self.clock_hz


@lru_cache(maxsize=1024)
def _stream_seconds(engine: Engine, linear: LinearShape, quant: str, load: int) -> tuple[float, str]:
    whole = StageShape(linear.inputs, linear.outputs, engine.ports, 1, 1, WEIGHT_BITS[quant])
    stage = cut_tiles(whole, engine.tile_words, 1)
    fetch, finish = stage.head_words + stage.tile_words, stage.tile * engine.ports * load
    multiply = stage.tile_words * (1 if engine.side_by_side else load)
    steps = (fetch, multiply, stage.scale_cycles(load), finish)
    fill = sum(steps) - max(steps)
    cycles = stage.tiles * max(steps) + fill
    waiting = linear.weight_bytes(quant) / engine.memory_rate
    if waiting >= cycles / engine.clock_hz:
        return waiting + fill / engine.clock_hz, "memory"
    return cycles / engine.clock_hz, "ports" if max(steps) == fetch else "compute"


def memory_rate(target: Target, ports: int) -> float:
    """Bytes per second that `ports` sequential weight streams get from the target's weight memories together.

    Streams are spread over the channels; a channel without a stream gives nothing.
    """
    rate, memories = 0.0, target.weight_memories
    share = ceil(ports / len(memories))
    for memory in memories:
        channel = memory.peak_bandwidth / memory.channels
        used, streams = min(memory.channels, share), ceil(share / memory.channels)
        rate += used * channel * timing_of(memory).efficiency(BURST_BYTES, streams, channel)
    return rate


def peak_bandwidth(target: Target) -> float:
    """Bytes per second of the weight memories, theoretical."""
    return sum(memory.peak_bandwidth for memory in target.weight_memories)
