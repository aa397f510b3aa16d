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
    """Rates of a host CPU: bytes per second of all cores, operations per clock of one, seconds per kernel call."""

    clock_ghz: float
    stream_bandwidth: float
    int8_macs_per_cycle: float
    flops_per_cycle: float
    call_seconds: float
    source: str
    cores: int = 1

    def seconds(self, *, bytes_read: float = 0.0, int8_macs: float = 0.0, flops: float = 0.0) -> float:
        """Return the time of one piece of work over all cores: reading or computing, whichever is longer."""
        rate = self.cores * self.clock_ghz * 1e9
        compute = int8_macs / (rate * self.int8_macs_per_cycle) + flops / (rate * self.flops_per_cycle)
        return max(bytes_read / self.stream_bandwidth, compute)


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
