"""How much of a memory's peak bandwidth sequential bursts reach: refresh, activations and bank conflicts.

No constant here is fitted to a measured system; the timings are the standards' (dram.toml). A measurement of the board,
where its target file has one, caps what the model says.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from math import ceil

from fastcar_compile.targets import Target
from fastcar_compile.targets.model import Memory

STREAM_BITS = 128
"""Bits per clock of one weight stream."""


@dataclass(frozen=True)
class DramTiming:
    """Timing of one technology, nanoseconds; `banks` and `row_bytes` of one channel."""

    t_rfc: float
    t_refi: float
    t_rp: float
    t_rcd: float
    t_faw: float
    banks: int
    row_bytes: int
    source: str

    def efficiency(self, burst_bytes: int, streams: int, channel_bandwidth: float) -> float:
        """Return the share of a channel's peak that `streams` interleaved sequential readers reach.

        Each burst opens at least one row. Activations of other banks hide behind transfers, as far as the four-activate
        window allows; one that meets a bank in use does not. With several streams, a burst follows one of another
        stream and meets its bank once in `banks`.

        Args:
            burst_bytes: bytes that one stream reads in sequence before another has its turn.
            streams: readers that share the channel.
            channel_bandwidth: bytes per second of one channel.
        """
        transfer = burst_bytes / channel_bandwidth * 1e9
        # A burst within one row still opens that row once.
        activations = max(1.0, burst_bytes / self.row_bytes)
        # The four-activate window lets one activation in every t_faw / 4 on average.
        busy = max(transfer, activations * self.t_faw / 4)
        conflict = (streams - 1) / streams / self.banks * (self.t_rp + self.t_rcd)
        # During refresh, t_rfc of every t_refi, the channel moves nothing.
        return (1 - self.t_rfc / self.t_refi) * transfer / (busy + conflict)


def timing_of(memory: Memory) -> DramTiming:
    """Return the timing of a board's memory."""
    table = tomllib.loads((files("fastcar_compile.codegen.hls.design") / "dram.toml").read_text())
    return DramTiming(**table[memory.technology])


def memory_rate(target: Target, ports: int) -> float:
    """Return the bytes per second that `ports` sequential weight streams get from the target's weight memories together.

    Streams are spread over the memories and their channels; a channel without a stream gives nothing. A controller that
    reorders gives each stream an equal part of its queue, so that a run in one row is at least that long.

    Args:
        ports: weight streams of 128 bits per clock; a wider AXI port carries several.
    """
    memories = target.weight_memories
    return sum(_rate_of(memory, ceil(ports / len(memories))) for memory in memories)


def _rate_of(memory: Memory, ports: int) -> float:
    physical = ceil(STREAM_BITS * ports / memory.width_bits)
    channel = memory.peak_bandwidth / memory.channels
    used, streams = min(memory.channels, physical), ceil(physical / memory.channels)
    # The reorder queue is shared, so more streams have shorter runs in one row.
    run = max(memory.burst_bytes, memory.reorder_bytes // streams)
    share = timing_of(memory).efficiency(run, streams, channel)
    return used * channel * min(share, memory.measured.share if memory.measured else 1.0)


def measured_cap(target: Target) -> float:
    """Return the bytes per second that were measured of the weight memories; of one without a measurement, its peak."""
    return sum(m.peak_bandwidth * (m.measured.share if m.measured else 1.0) for m in target.weight_memories)


def peak_bandwidth(target: Target) -> float:
    """Return the bytes per second of the weight memories, theoretical."""
    return sum(memory.peak_bandwidth for memory in target.weight_memories)
