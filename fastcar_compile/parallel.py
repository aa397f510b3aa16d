"""Usable cores, and a parallel map over them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def at_once(function: Callable[[T], R], values: Iterable[T], threads: int | None = None) -> list[R]:
    """Return `function` of every value, in order.

    Args:
        threads: that compute it; None: one per usable core.
    """
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        return list(pool.map(function, values))


def streamed(function: Callable[[T], R], values: Iterable[T], threads: int | None = None) -> Iterator[R]:
    """Yield `function` of every value, in order, as it is computed; two results per thread wait at most.

    Args:
        threads: that compute it; None: one per usable core.
    """
    threads = threads or usable_cores()
    waiting = deque[Future[R]]()
    with ThreadPoolExecutor(threads) as pool:
        for value in values:
            waiting.append(pool.submit(function, value))
            if len(waiting) == 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def usable_cores() -> int:
    """Return the number of cores of this process: its affinity, limited to whole cores of its CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the least CPU quota, in cores, of the control groups of this process; None without a limit.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    limits = (_limit(group) for group in control_groups("cpu", root))
    return min((limit for limit in limits if limit is not None), default=None)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's control groups that have a controller, and of every group above them.

    Args:
        controller: for example "cpu". root: folder that holds `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("ascii").splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0" or controller in controllers.split(","):
            version2 = hierarchy == "0"
            yield from _with_parents(root / "sys/fs/cgroup", "unified" if version2 else controllers, controller, group)


def _with_parents(mount: Path, name: str, controller: str, group: str) -> Iterator[Path]:
    """Yield a group's folder and those above it, up to where the hierarchy `name` is mounted."""
    bases = [mount, mount / name] if name == "unified" else [mount / name, mount / controller]
    base = next((b for b in bases if b.is_dir()), mount)
    folder = base / group.lstrip("/")
    yield from (place for place in (folder, *folder.parents) if place.is_relative_to(base))


def _limit(group: Path) -> float | None:
    """Return a group's limit in cores, or None.

    Version 2 has cpu.max ("max 100000", "150000 100000"). Version 1 has quota and period; a quota of -1 is no limit.
    """
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text("ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text("ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text("ascii").strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None
