"""One session, one thread, one process: the guard that refuses other threads and processes."""

import itertools
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, SupportsIndex

from fastcar_compile.errors import BackendError, InputError, count_text, shown
from fastcar_compile.runtime.tvm_runtime import global_function
from fastcar_compile.support.machine import usable_cores
from fastcar_compile.support.values import plain

SPIN_COUNT = "4000"
"""Times that an idle worker of TVM's pool yields before it sleeps: about 2 ms, longer than the time between two decode
steps. TVM's own default is about 160 ms, for which it would take a core from the next program."""

_SHARE_ALL_CORES = -3
"""TVM's `kSpecifyThreadShareAllCore`: workers may run on any of the named cores. Its other modes bind each worker, and
the calling thread, to one core, and every other process with such a mode to the same core."""

_pool = threading.local()
"""TVM has one pool per calling thread; `size` is the last size of this thread's pool, `forks` names its process."""


def thread_count(threads: SupportsIndex | None) -> int:
    """Return the number of threads: None means one per usable core.

    Raises:
        InputError: `threads` is not a whole number from 1 to the number of cores that the process may run on.
    """
    if threads is None:
        return usable_cores()
    # The affinity mask counts, not the machine: a container or taskset may leave fewer cores.
    most = len(os.sched_getaffinity(0))
    count: Any = plain(threads)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        what = f"threads is {shown(count)}; expected is a whole number from 1 to {most}, the cores of this process"
        raise InputError(what, hint="leave it out to use every core that the process may use")
    return count


def use_threads(count: int) -> None:
    """Set TVM's pool of the calling thread to `count` threads, this thread among them; a second call costs nothing.

    Raises:
        BackendError: the pool of this thread was made for fewer threads.
        InputError: this thread had a pool of several threads in the parent process, before a fork.
    """
    # Threads do not survive a fork. The pool of the forking thread is copied without its workers, and TVM would set the
    # affinity of threads that are gone even to use one of them, which at times crashes.
    inherited, size = getattr(_pool, "forks", forks()) != forks(), getattr(_pool, "size", None)
    if inherited and (size, count) != (1, 1):
        what = f"{count_text(count, 'thread')} asked for in a thread that had TVM's threads before a fork, "
        what += "which ended them"
        hint = "open the session in another thread of this process, or start children with multiprocessing's 'spawn'"
        raise InputError(what, hint=hint)
    if size == count:
        return
    # The pool is made at its first use, as large as the list of cores is long; later it can only use fewer.
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", SPIN_COUNT)
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    named = list(itertools.islice(itertools.cycle(cores), max(count, len(cores))))
    global_function("runtime.config_threadpool")(_SHARE_ALL_CORES, count, named)
    found = int(global_function("runtime.NumThreads")())
    if found != count:
        what = f"TVM's thread pool has {found} threads, {count} were asked for; it was made for {found} and cannot grow"
        raise BackendError(what, hint="open the session with the most threads first, or unset TVM_NUM_THREADS")
    _pool.size = count
    _pool.forks = getattr(_pool, "forks", forks())  # a pool stays in the process in which it was made


_forks: list[None] = []
"""One entry for each fork between the first process and this one: cheaper to compare than a process id."""
os.register_at_fork(after_in_child=lambda: _forks.append(None))


def forks() -> int:
    """Return the number of Python's forks between this process and the first process."""
    return len(_forks)


class Guard:
    """Lets one call at a time into a session, by the thread that began the sequence, in the process that opened it.

    `with guard:` is for calls that go on with the sequence; `with guard.begun():` is for calls that begin a sequence.

    Attributes:
        calling: True while the running call is in a function of its caller, which must not call the session again.
    """

    __slots__ = ("_closed", "_forks", "_inside", "_owner", "calling")

    def __init__(self) -> None:
        self._inside = dict[str, int]()
        self._owner, self._forks, self._closed, self.calling = 0, len(_forks), False, False

    def __enter__(self) -> None:
        """Enter; the first thread that enters owns the sequence.

        Raises:
            InputError: the sequence belongs to another thread or process, the call is within a call, or the session is
                closed.
        """
        thread = self._enter()
        if self._owner != thread:
            self._own(thread)

    def __exit__(self, *_: object) -> None:
        self._inside.clear()

    @contextmanager
    def begun(self, owned: bool = True) -> Generator[None]:
        """Enter, and make the calling thread the owner of the sequence that begins; not `owned`: the owner stays.

        Raises:
            InputError: a call is running, the session belongs to another process, or it is closed.
        """
        thread = self._enter()
        self._owner = thread if owned else self._owner
        try:
            yield
        finally:
            self._inside.clear()

    def close(self) -> bool:
        """Refuse new calls; return True where the session's resources may be released now.

        In a child process they may not: the release would wait for threads of the parent.

        Raises:
            InputError: a call is running.
        """
        # Entering first refuses to close during a call.
        # A child process skips it: the fork may have copied a call that never ends here.
        if self._forks == len(_forks) and not self._closed:
            with self.begun():
                self._closed = True
        self._closed = True
        return self._forks == len(_forks)

    def _enter(self) -> int:
        """Return the calling thread, which is inside from then on."""
        thread = get_ident()
        # Ctrl-C may come before an exit has noted anything. So a thread that seems to be inside may enter again, unless
        # it is in a caller's function. `setdefault` is atomic for all threads.
        refused = self._forks != len(_forks) or self._closed
        if refused or self._inside.setdefault("thread", thread) != thread or self.calling:
            raise self._refusal()
        return thread

    def _own(self, thread: int) -> None:
        if self._owner:
            self._inside.clear()
            what = "the session is used by a second thread: the sequence that it holds belongs to another thread"
            hint = "open one session per thread, sessions share the weights; "
            raise InputError(what, hint=f"{hint}or call reset() in this thread, which takes the session over")
        self._owner = thread

    def _refusal(self) -> InputError:
        what = "the session is used by a second thread while a call is running"
        hint = "open one session per thread; sessions share the weights"
        if self._forks != len(_forks):
            what = "the session was opened before a fork, in the parent process"
            hint = "open the session in the child process, or start children with multiprocessing's 'spawn'"
        elif self._closed:
            what, hint = "the session is closed", "open another session; sessions share the weights"
        elif self._inside.get("thread") == get_ident():
            what = "the session was called from within its own call"
            hint = "a sampler or on_token may read it and set thresholds; to decode there, open another session"
        return InputError(what, hint=hint)
