"""How many cores a session uses, and TVM's thread pool."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from fastcar_compile.errors import BackendError

SPIN_COUNT = "4000"
"""Times that an idle worker of TVM's pool yields before it sleeps: about 2 ms, more than passes between two steps.
TVM's own default is about 160 ms, for which it would take a core from whatever runs next."""

_SHARE_ALL_CORES = -3
"""TVM's `kSpecifyThreadShareAllCore`: workers may run on any of the named cores. Its other modes bind each worker, and
the calling thread, to one core, where every other process that does so is too."""

_pool = threading.local()
"""TVM has one pool per calling thread; `size` is what this thread's was last set to."""


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


def use_threads(count: int) -> None:
    """Make TVM's pool of the calling thread run `count` threads, this one among them. Costs nothing if it does already.

    Raises:
        BackendError: the pool of this thread was made for fewer.
    """
    if getattr(_pool, "size", None) == count:
        return
    import tvm

    # The pool is made at its first use, as large as the list of cores is long; later it can only use fewer.
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", SPIN_COUNT)
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    named = list(itertools.islice(itertools.cycle(cores), max(count, len(cores))))
    tvm.get_global_func("runtime.config_threadpool")(_SHARE_ALL_CORES, count, named)
    found = int(tvm.get_global_func("runtime.NumThreads")())
    if found != count:
        raise BackendError(
            f"TVM's thread pool has {found} threads, {count} were asked for; it was made for {found} and cannot grow",
            mend="open the session with the most threads first, or unset TVM_NUM_THREADS",
        )
    _pool.size = count
