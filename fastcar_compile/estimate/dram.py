"""How much of a memory's peak bandwidth sequential bursts reach: refresh, activations and bank conflicts.

No constant here is fitted to a measured system; the timings are the standards' (dram.toml).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from fastcar_compile.targets.model import Memory


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
        """Share of a channel's peak that `streams` interleaved sequential readers reach.

        Each burst opens at least one row. Activations of other banks hide behind transfers, as far as the four-activate
        window allows; one that meets a bank in use does not. With several streams, a burst follows one of another
        stream and meets its bank once in `banks`.

        Args:
            burst_bytes: bytes that one request reads in sequence.
            streams: readers that share the channel.
            channel_bandwidth: bytes per second of one channel.
        """
        transfer = burst_bytes / channel_bandwidth * 1e9
        activations = max(1.0, burst_bytes / self.row_bytes)
        busy = max(transfer, activations * self.t_faw / 4)
        conflict = (streams - 1) / streams / self.banks * (self.t_rp + self.t_rcd)
        return (1 - self.t_rfc / self.t_refi) * transfer / (busy + conflict)


def timing_of(memory: Memory) -> DramTiming:
    """The timing of a board's memory."""
    table = tomllib.loads((files("fastcar_compile.estimate") / "dram.toml").read_text())
    return DramTiming(**table[memory.technology])
