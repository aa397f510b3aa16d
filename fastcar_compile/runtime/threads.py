"""TVM's thread pool."""

from __future__ import annotations

import itertools
import os
import threading

from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.tvm_runtime import global_function

SPIN_COUNT = "4000"
"""Times that an idle worker of TVM's pool yields before it sleeps: about 2 ms, more than passes between two steps.
TVM's own default is about 160 ms, for which it would take a core from whatever runs next."""

_SHARE_ALL_CORES = -3
"""TVM's `kSpecifyThreadShareAllCore`: workers may run on any of the named cores. Its other modes bind each worker, and
the calling thread, to one core, where every other process that does so is too."""

_pool = threading.local()
"""TVM has one pool per calling thread; `size` is what this thread's was last set to."""


def use_threads(count: int) -> None:
    """Make TVM's pool of the calling thread run `count` threads, this one among them; free of cost if it does already.

    Raises:
        BackendError: the pool of this thread was made for fewer.
    """
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
