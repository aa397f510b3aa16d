"""One session, one thread, one process: what refuses the others."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from threading import get_ident
from types import TracebackType

from fastcar_compile.errors import InputError


class _Forks:
    """Counts the forks between the first process and this one: cheaper to compare than a process id."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.count += 1


_forks = _Forks()


def forks() -> int:
    """Return how many forks of Python's lie between this process and the first one."""
    return _forks.count


class Guard:
    """Lets one call at a time into a session, of the thread that began the sequence, in the process that opened it.

    `with guard:` is for calls that go on with the sequence; `with guard.begun():` for those that begin another one.

    Attributes:
        calling: the running call is in a function of its caller, which must not call the session again.
    """

    __slots__ = ("_closed", "_forks", "_inside", "_owner", "calling")

    def __init__(self) -> None:
        self._inside = dict[str, int]()
        self._owner, self._forks, self._closed, self.calling = 0, _forks.count, False, False

    def __enter__(self) -> None:
        """Enter; the first thread that does so owns the sequence.

        Raises:
            InputError: another thread's sequence, a call within a call, another process, or a closed session.
        """
        thread = self._enter()
        if self._owner != thread:
            self._own(thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.clear()

    @contextmanager
    def begun(self) -> Generator[None]:
        """Enter, and make the calling thread the owner of the sequence that begins.

        Raises:
            InputError: a call is running, another process, or a closed session.
        """
        self._owner = self._enter()
        try:
            yield
        finally:
            self._inside.clear()

    def close(self) -> bool:
        """Refuse new calls; return whether what the session holds may be given back now.

        It may not in a child process: threads that it would wait for are the parent's.

        Raises:
            InputError: a call is running.
        """
        # Entering first refuses to close during a call.
        # A child process skips it: the fork may have copied a call that never ends here.
        if self._forks == _forks.count and not self._closed:
            with self.begun():
                self._closed = True
        self._closed = True
        return self._forks == _forks.count

    def _enter(self) -> int:
        """Return the calling thread, which is inside from then on."""
        thread = get_ident()
        # Ctrl-C may come before an exit has noted anything. So a thread that seems to be inside may enter again, unless
        # it is in a caller's function. `setdefault` is one step for all threads.
        if (
            self._forks != _forks.count
            or self._closed
            or self._inside.setdefault("thread", thread) != thread
            or self.calling
        ):
            raise self._refusal()
        return thread

    def _own(self, thread: int) -> None:
        if self._owner:
            self._inside.clear()
            raise InputError(
                "the session is used by a second thread: the sequence that it holds is another thread's",
                hint="open one session per thread, they share the weights; "
                "or call reset() in this thread, which takes the session over",
            )
        self._owner = thread

    def _refusal(self) -> InputError:
        if self._forks != _forks.count:
            return InputError(
                "the session was opened before a fork, in the parent process",
                hint="open the session in the child process, or start children with multiprocessing's 'spawn'",
            )
        if self._closed:
            return InputError("the session is closed", hint="open another one; they share the weights")
        if self._inside.get("thread") == get_ident():
            return InputError(
                "the session was called from within its own call",
                hint="a sampler or on_token may read it and set thresholds; to decode there, open another session",
            )
        return InputError(
            "the session is used by a second thread while a call is running",
            hint="open one session per thread; they share the weights",
        )
