"""How many cores there are to use, and work on all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T, R = TypeVar("T"), TypeVar("R")


def at_once(function: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """`function` of every value, in order, on as many threads as there are usable cores."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(function, values))


def usable_cores() -> int:
    """Cores that this process may use: of its affinity, and whole ones of its control group's CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of CPU time that the control groups of this process allow (the least of them); None: no limit.

    Args:
        root: where `proc` and `sys` are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("ascii").splitlines()
    except OSError:
        return None
    limits = [limit for line in lines for limit in _limits(root / "sys/fs/cgroup", *line.split(":", 2))]
    return min(limits, default=None)


def _limits(mount: Path, hierarchy: str, controllers: str, group: str) -> Iterator[float]:
    """Limits of one line of /proc/self/cgroup: those of the group and of every group above it."""
    if hierarchy == "0":
        bases = [mount, mount / "unified"]
    elif "cpu" in controllers.split(","):
        bases = [mount / controllers, mount / "cpu"]
    else:
        return
    base = next((b for b in bases if b.is_dir()), mount)
    folder = base / group.lstrip("/")
    for place in (folder, *folder.parents):
        if not place.is_relative_to(base):
            return
        limit = _limit(place)
        if limit is not None:
            yield limit


def _limit(group: Path) -> float | None:
    """cpu.max of version 2 ("max 100000", "150000 100000"), or quota and period of version 1 (-1: none)."""
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text("ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text("ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text("ascii").strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None
