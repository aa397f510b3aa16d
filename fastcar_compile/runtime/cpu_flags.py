"""What the running CPU offers, as the kernel names it."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the first `flags` (x86) or `Features` (Arm) line; empty where there is no such file or line."""
    try:
        lines = cpuinfo.read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
