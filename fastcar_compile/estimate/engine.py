"""Time of one start of the emitted engine, in closed form.

Loops come from the loop table (codegen/hls/design/loops.py). The cycle model (fastcar_compile.simulation) runs the same
loops against each other; a test holds the two within 5 % of each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.loops import Load, load_loop, quantize_loops, tile_loops
from fastcar_compile.codegen.hls.design.product import WORD_BYTES, Product, float_words
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS
from fastcar_compile.estimate.call import CallPart, EngineCall, NamedProduct
from fastcar_compile.estimate.memory import Memory, memory_of
from fastcar_compile.estimate.shapes import LinearShape
from fastcar_compile.targets import Target


class RowLoad(NamedTuple):
    """Rows that compute in a layer, and passes of the core that has most of them."""

    rows: int
    passes: int


class EngineModel(ABC):
    """The engine of a design on a board, and how long its calls take."""

    def __init__(self, design: Design, target: Target) -> None:
        self.design, self.target = design, target
        self.memory = memory_of(design, target)
        self._known: dict[EngineCall, tuple[CallPart, ...]] = {}

    @property
    def clock_hz(self) -> float:
        """Clocks per second."""
        return self.design.budget.clock_mhz * 1e6

    @property
    def cores(self) -> int:
        """Cores of the array."""
        return self.design.mlp.cores

    @cached_property
    def stream_rate(self) -> float:
        """Bytes per second of an undisturbed weight stream."""
        return min(float(self.design.ports), self.memory.rate) * WORD_BYTES * self.clock_hz

    def call_of(self, linears: Sequence[LinearShape], load: RowLoad) -> EngineCall:
        """Return one start: of a linear, or of the two of an MLP."""
        design, last = self.design, len(linears) - 1
        products = tuple(NamedProduct(x.name, self._product(x), i < last) for i, x in enumerate(linears))
        work = Load(load.rows, load.passes, design.mlp.cores, design.scale_rows)
        copied = design.mlp.batch - load.rows if last else 0
        return EngineCall(products, work, design.ports, copied=copied)

    def parts_of(self, call: EngineCall) -> tuple[CallPart, ...]:
        """Return the spans of a call; a call that is known is not timed again."""
        if call not in self._known:
            self._known[call] = self.parts(call)
        return self._known[call]

    @abstractmethod
    def parts(self, call: EngineCall) -> tuple[CallPart, ...]:
        """Return the spans of a call."""

    def _product(self, linear: LinearShape) -> Product:
        """Return how this engine computes a linear: as it is emitted, else with the tiles that its buffers hold."""
        own = {(p.inputs, p.channels): p for p in self.design.products}
        return own.get((linear.inputs, linear.outputs)) or self.design.fit(
            LinearSpec(linear.name, linear.inputs, linear.outputs)
        )


class ClosedForm(EngineModel):
    """Stages of tiles that overlap at the pace of the slowest, or a weight stream that is slower than that."""

    def parts(self, call: EngineCall) -> tuple[CallPart, ...]:
        """Return the spans of a call."""
        parts, gap = list[CallPart](), _load_clocks(call, self.memory)
        left = _write_clocks(call, self.memory)
        for number, named in enumerate(call.products):
            gap += sum(loop.cycles for loop in quantize_loops(named.product, call.load))
            ready = call.held if number == 0 else 0
            clocks, unit = _product_clocks(call, named, self.memory, ready, gap)
            moved = named.product.port_words * call.ports * WORD_BYTES
            parts.append(CallPart(f"{named.name} rows", "edge", gap / self.clock_hz))
            parts.append(CallPart(named.name, unit, clocks / self.clock_hz, moved))
            left, gap = left - gap - clocks, 0.0
        if left > 0:
            parts.append(CallPart("rows out", "edge", left / self.clock_hz))
        return tuple(parts)


def _load_clocks(call: EngineCall, memory: Memory) -> float:
    """Return the clocks until the rows of x are in the cores; each is a burst that waits for the memory."""
    inputs, rows = call.products[0].product.inputs, call.load.rows
    return float(
        max(memory.latency + load_loop(inputs, call.load).cycles, rows * (float_words(inputs) + memory.latency))
    )


def _write_clocks(call: EngineCall, memory: Memory) -> float:
    """Return the clocks that the process works that writes y: copied rows first, then those of every tile."""
    last = call.products[-1]
    copies = call.copied * (call.results + memory.latency)
    return float(copies + last.product.tiles * tile_loops(last.product, call.load).send.trips)


def _product_clocks(call: EngineCall, named: NamedProduct, memory: Memory, held: int, gap: float) -> tuple[float, str]:
    """Return the clocks of a product's tiles, and what bounds them.

    Args:
        held: words that the prefetch buffer has. gap: clocks before the first tile, in which the FIFOs fill.
    """
    product = named.product
    rate = min(1 - memory.refreshing, memory.rate / call.ports)
    stages = [loop.cycles for loop in tile_loops(product, call.load, inner=named.inner).stages]
    pace, tail = max(stages), float(sum(stages[1:]))
    ahead = min(gap * rate, FIFO_WORDS + memory.window) + held
    streamed = max(0.0, product.port_words - ahead) / rate + tail
    flowing = float((product.tiles - 1) * pace + sum(stages))
    if streamed > flowing:
        return streamed, "memory"
    return flowing, "ports" if pace == stages[0] else "compute"
