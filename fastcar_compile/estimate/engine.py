"""Time of the emitted compute engine: cycles from its loop structure, bytes from its weight stream.

The structure is that of hls_templates/fastcar_engine_processes.hpp: rows are loaded and quantised, then tiles are
fetched, multiplied, scaled, finished and sent in a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.dram import memory_rate
from fastcar_compile.codegen.hls.design.loops import Load, tile_loops
from fastcar_compile.codegen.hls.design.product import WORD_BYTES, Product, float_words
from fastcar_compile.codegen.hls.design.spec import WEIGHT_BITS
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS
from fastcar_compile.estimate.shapes import LinearShape
from fastcar_compile.targets import Target


@dataclass(frozen=True)
class Engine:
    """The engine of one design on one board.

    Args:
        memory_rate: bytes per second that the weight memories deliver to the engine's ports.
        fifo_bytes: weights that the ports' FIFOs take before the first product starts.
        prefetch_bytes: weights of the next layer that the prefetch buffer holds.
        scale_rows: least rows of a tile in the loop over groups. axi_words: weight ports that an AXI port carries.
    """

    clock_hz: float
    ports: int
    cores: int
    rows: int
    tile_words: int
    memory_rate: float
    fifo_bytes: int
    prefetch_bytes: int
    scale_rows: int
    axi_words: int = 1

    @classmethod
    def of(cls, design: Design, target: Target) -> Engine:
        """Return the engine of an emitted design."""
        return cls(
            clock_hz=design.budget.clock_mhz * 1e6,
            ports=design.ports,
            cores=design.mlp.cores,
            rows=design.mlp.batch,
            tile_words=design.max_tile_words,
            memory_rate=memory_rate(target, design.ports),
            fifo_bytes=design.ports * FIFO_WORDS * WORD_BYTES,
            prefetch_bytes=design.prefetch_bytes,
            scale_rows=design.scale_rows,
            axi_words=design.axi_words,
        )

    @property
    def port_rate(self) -> float:
        """Bytes per second that the weight ports can take: 16 bytes per clock each."""
        return self.ports * WORD_BYTES * self.clock_hz

    @property
    def stream_rate(self) -> float:
        """Bytes per second of an undisturbed weight stream."""
        return min(self.port_rate, self.memory_rate)

    def load(self, replayed: tuple[bool, ...], *, drs: bool) -> int:
        """Return the rows of the core that has most to compute: round-robin over them (DRS), or fixed row mod C."""
        computing = [row for row, replays in enumerate(replayed) if not replays]
        if drs:
            return ceil(len(computing) / self.cores)
        return max((sum(row % self.cores == core for row in computing) for core in range(self.cores)), default=0)

    def stream_seconds(self, linear: LinearShape, quant: str, load: int) -> tuple[float, str]:
        """Return the time of the tile pipeline and what bounds it: "memory", "ports" or "compute"."""
        return _stream_seconds(self, linear, quant, load)

    def edge_seconds(self, inputs: int, outputs: int, load: int, *, between: int = 0) -> float:
        """Return the time outside of it: load a row, find its maximum, quantise it, store it; four values a clock.

        Args:
            between: values that are quantised between two products of one call (the MLP's activations).
        """
        words = 3 * float_words(inputs) + 2 * float_words(between) + float_words(outputs)
        return load * words / self.clock_hz


@lru_cache(maxsize=1024)
def _stream_seconds(engine: Engine, linear: LinearShape, quant: str, load: int) -> tuple[float, str]:
    product = Product(linear.inputs, linear.outputs, engine.ports, bits=WEIGHT_BITS[quant]).cut(engine.tile_words)
    work = Load(min(load * engine.cores, engine.rows), load, engine.cores, engine.scale_rows)
    steps = tuple(loop.cycles for loop in tile_loops(product, work).stages)
    fetch = steps[0]
    fill = sum(steps) - max(steps)
    cycles = product.tiles * max(steps) + fill
    waiting = linear.weight_bytes(quant) / engine.memory_rate
    if waiting >= cycles / engine.clock_hz:
        return waiting + fill / engine.clock_hz, "memory"
    return cycles / engine.clock_hz, "ports" if max(steps) == fetch else "compute"
