"""TVM's thread pool."""

from __future__ import annotations

import itertools
import operator
import os
import threading
from typing import SupportsIndex

from fastcar_compile.errors import BackendError, InputError
from fastcar_compile.parallel import usable_cores
from fastcar_compile.runtime.guard import forks
from fastcar_compile.runtime.tvm_runtime import global_function

SPIN_COUNT = "4000"
"""Times that an idle worker of TVM's pool yields before it sleeps: about 2 ms, more than passes between two steps.
TVM's own default is about 160 ms, for which it would take a core from whatever runs next."""

_SHARE_ALL_CORES = -3
"""TVM's `kSpecifyThreadShareAllCore`: workers may run on any of the named cores. Its other modes bind each worker, and
the calling thread, to one core, where every other process that does so is too."""

_MANY = 10**9
"""A number from here on is not written out in an error: Python refuses to write one of 4,300 digits."""

_pool = threading.local()
"""TVM has one pool per calling thread; `size` is what this thread's was last set to, `forks` where it was made."""


def thread_count(threads: SupportsIndex | None) -> int:
    """Return the number of threads that is meant: None is one per usable core.

    Raises:
        InputError: it is no whole number from 1 to the number of cores that the process may run on.
    """
    if threads is None:
        return usable_cores()
    # The affinity mask counts, not the machine: a container or taskset may leave fewer cores.
    most = len(os.sched_getaffinity(0))
    try:
        count = -1 if isinstance(threads, bool) else operator.index(threads)
    except TypeError:
        count = -1
    if not 1 <= count <= most:
        given = count if 0 <= count < _MANY else f"a value of type {type(threads).__name__}"
        raise InputError(
            f"threads is {given}; expected is a whole number from 1 to {most}, the cores of this process",
            hint="leave it out to use every core that the process may use",
        )
    return count


def use_threads(count: int) -> None:
    """Make TVM's pool of the calling thread run `count` threads, this one among them; free of cost if it does already.

    Raises:
        BackendError: the pool of this thread was made for fewer.
        InputError: this thread had a pool in the parent process, before a fork.
    """
    # Threads do not survive a fork. The pool of the forking thread is copied without its workers.
    inherited = getattr(_pool, "forks", forks()) != forks()
    if inherited and count > 1:
        raise InputError(
            f"{count} threads are asked for in a thread that had TVM's threads before a fork, which ended them",
            hint="open the session with threads=1, or in another thread of this process, "
            "or start children with multiprocessing's 'spawn'",
        )
    if getattr(_pool, "size", None) == count:
        return
    # The pool is made at its first use, as large as the list of cores is long; later it can only use fewer.
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", SPIN_COUNT)
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    named = list(itertools.islice(itertools.cycle(cores), max(count, len(cores))))
    global_function("runtime.config_threadpool")(_SHARE_ALL_CORES, count, named)
    found = int(global_function("runtime.NumThreads")())
    if found != count:
        raise BackendError(
            f"TVM's thread pool has {found} threads, {count} were asked for; it was made for {found} and cannot grow",
            hint="open the session with the most threads first, or unset TVM_NUM_THREADS",
        )
    _pool.size = count
    _pool.forks = getattr(_pool, "forks", forks())  # a pool stays in the process in which it was made
