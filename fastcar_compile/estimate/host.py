"""The host CPU: time of what is not offloaded."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from fastcar_compile.errors import TargetError
from fastcar_compile.targets import Target

SERVER_CORES = 8
"""Cores of a server host whose target says "as many as there are"."""


@dataclass(frozen=True)
class HostModel:
    """Rates of a host CPU.

    Args:
        stream_bandwidth: bytes per second that all cores together read of memory.
        int8_macs_per_cycle, flops_per_cycle: of one core.
        row_bytes_per_cycle: that one core loads and stores of rows in its first-level cache.
        call_seconds: of starting a kernel and seeing its end.
    """

    clock_ghz: float
    stream_bandwidth: float
    int8_macs_per_cycle: float
    flops_per_cycle: float
    row_bytes_per_cycle: float
    call_seconds: float
    source: str
    cores: int = 1

    def seconds(self, *, bytes_read: float = 0.0, int8_macs: float = 0.0, flops: float = 0.0) -> float:
        """Return the time of one piece of work over all cores: reading or computing, whichever is longer."""
        rate = self.cores * self.clock_ghz * 1e9
        compute = int8_macs / (rate * self.int8_macs_per_cycle) + flops / (rate * self.flops_per_cycle)
        return max(bytes_read / self.stream_bandwidth, compute)

    def row_seconds(self, moved: float) -> float:
        """Return the time of moving so many bytes of rows through one core.

        Norms and rotary embeddings are serial loops, whose loads and stores take longer than their arithmetic
        (codegen/tvm/kernels/norm).
        """
        return moved / (self.clock_ghz * 1e9 * self.row_bytes_per_cycle)


def host_of(target: Target) -> HostModel:
    """Return the model of a target's host.

    Raises:
        TargetError: there are no figures for its CPU.
    """
    table = tomllib.loads((files("fastcar_compile.estimate") / "hosts.toml").read_text())
    if target.host.cpu not in table:
        raise TargetError(
            f"there are no figures for the host {target.host.cpu} of {target.name}",
            hint=f"known hosts: {', '.join(sorted(table))}",
        )
    return HostModel(**table[target.host.cpu], cores=target.host.cores or SERVER_CORES)
