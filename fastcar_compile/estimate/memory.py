"""The weight memory as the engine's ports see it, in words of 128 bits and clocks of the fabric."""

from __future__ import annotations

from dataclasses import dataclass

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.dram import memory_rate, timing_of
from fastcar_compile.codegen.hls.design.product import WORD_BYTES
from fastcar_compile.codegen.hls.design.usage import READS
from fastcar_compile.targets import Target

READ_SECONDS = {"ddr4": 300e-9, "hbm2": 140e-9}
"""From a request of the fabric to its first word. ddr4: estimate for the PS's memory behind its interconnect.
hbm2: a page miss on a U280, 138 ns (Shuhai, Wang et al., FCCM 2020)."""


@dataclass(frozen=True)
class Memory:
    """A memory controller, or several that are used alike.

    Args:
        rate: words per clock that all its users together get, refresh included. latency: clocks from a request to its
            first word. window: words that one user may have under way (outstanding requests times burst).
        refresh_interval, refresh: clocks from one refresh to the next, and clocks of one, in which nothing moves.
    """

    rate: float
    latency: int
    window: int
    refresh_interval: float = 0.0
    refresh: float = 0.0

    @property
    def refreshing(self) -> float:
        """Share of the time in which it refreshes, and a port that takes a word per clock gets none."""
        return self.refresh / self.refresh_interval if self.refresh else 0.0

    @property
    def free_rate(self) -> float:
        """Words per clock between two refreshes."""
        return self.rate / (1 - self.refreshing)


def memory_of(design: Design, target: Target) -> Memory:
    """Return the memory that a design's weight ports read."""
    clock, memory = design.budget.clock_mhz * 1e6, target.weight_memories[0]
    timing = timing_of(memory)
    return Memory(
        rate=memory_rate(target, design.ports) / WORD_BYTES / clock,
        latency=round(READ_SECONDS[memory.technology] * clock),
        window=READS.length * READS.outstanding // WORD_BYTES,
        refresh_interval=timing.t_refi * 1e-9 * clock,
        refresh=timing.t_rfc * 1e-9 * clock,
    )
