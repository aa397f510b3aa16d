"""The memory behind the weight ports as the engine waits for it, and how long attention takes at its pace."""

from dataclasses import dataclass

from fastcar_compile.artifact.engine import WORD_BYTES
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.loops import STREAM_DEPTH
from fastcar_compile.codegen.hls.design.memory import memory_rate, timing_of
from fastcar_compile.codegen.hls.design.step_loops import AttendWork, attend_loops
from fastcar_compile.codegen.hls.design.usage import READS
from fastcar_compile.config.targets import Target

READ_SECONDS = {"ddr4": 300e-9, "hbm2": 140e-9}
"""From a request of the fabric to its first word. ddr4: estimate for the PS's memory behind its interconnect.
hbm2: a page miss on a U280, 138 ns (Shuhai, Wang et al., FCCM 2020)."""


@dataclass(frozen=True)
class EngineMemory:
    """A memory controller, or several that are used alike.

    Args:
        rate: words per clock that all its users together get, refresh included. latency: clocks from a request to its
            first word. window: words that one weight port may have under way (outstanding requests times burst, shared by
            those of an AXI port).
        refresh_interval, refresh: clocks from one refresh to the next, and clocks of one, in which nothing moves.
        rows_apart: rows of x come from another memory.
    """

    rate: float
    latency: int
    window: int
    refresh_interval: float = 0.0
    refresh: float = 0.0
    rows_apart: bool = False

    @property
    def burst(self) -> float:
        """Words of one request."""
        return self.window / READS.outstanding

    @property
    def refreshing(self) -> float:
        """Share of the time in which it refreshes, and a port that takes a word per clock gets none."""
        return self.refresh / self.refresh_interval if self.refresh else 0.0


def memory_of(design: Design, target: Target) -> EngineMemory:
    """Return the memory that a design's weight ports read."""
    clock, memory = design.budget.clock_mhz * 1e6, target.weight_memories[0]
    timing = timing_of(memory)
    return EngineMemory(
        rate=memory_rate(target, design.ports) / WORD_BYTES / clock,
        latency=round(READ_SECONDS[memory.technology] * clock),
        window=READS.length * READS.outstanding // (WORD_BYTES * design.axi_words),
        refresh_interval=timing.t_refi * 1e-9 * clock,
        refresh=timing.t_rfc * 1e-9 * clock,
        rows_apart=memory.bank_bytes is not None,
    )


def attend_clocks(work: AttendWork, memory: EngineMemory) -> float:
    """Return the clocks: of each pass its turns at the pace of the cache, the softmax or the queries, and the last one's end."""
    layout, own = work.layout, attend_loops(work)
    rate = min(1 - memory.refreshing, memory.rate / work.ports)
    keys = memory.latency + max(layout.key_words / rate, own.logits.clocks)
    tile = max(
        layout.value_tile_words / rate, *(loop.clocks for loop in (own.weigh, own.limbs, own.multiply_values, own.add))
    )
    values = memory.latency + layout.value_tiles * tile
    softmax = own.keep.cycles + own.soften.cycles + own.invert.cycles
    split = sum(loop.cycles for loop in own.split)
    # The values of the last turn wait until its softmax is done, and nothing else is read meanwhile.
    wait = max(0.0, own.logits.depth + own.keep.depth + own.soften.cycles - memory.latency)
    first = max(0.0, split - memory.latency)
    last = own.weigh.depth + own.limbs.depth + own.multiply_values.depth + own.add.depth
    turns = max(
        # Keys come to the ports while the first queries are split, as many as are asked for.
        max(0.0, first - memory.window / rate) + work.turns * (keys + values) + wait,
        first + keys + work.turns * softmax + values,
        first + (work.turns - 1) * split + keys + values,
    )
    return work.passes * (STREAM_DEPTH + turns + last + work.lanes * own.finish.cycles)
