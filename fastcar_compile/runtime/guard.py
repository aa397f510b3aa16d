"""One session, one thread, one process: what refuses the others."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock, get_ident
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
    """

    __slots__ = ("_closed", "_enter", "_forks", "_leave", "_owner")

    def __init__(self) -> None:
        busy = Lock()
        self._enter, self._leave = busy.acquire, busy.release
        self._owner, self._forks, self._closed = 0, _forks.count, False

    def __enter__(self) -> None:
        """Enter; the first thread that does so owns the sequence.

        Raises:
            InputError: another thread's sequence, a call within a call, another process, or a closed session.
        """
        if self._forks != _forks.count or self._closed or not self._enter(False):
            raise self._refusal()
        if self._owner != get_ident():
            self._own()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    @contextmanager
    def begun(self) -> Generator[None]:
        """Enter, and make the calling thread the owner of the sequence that begins.

        Raises:
            InputError: a call is running, another process, or a closed session.
        """
        if self._forks != _forks.count or self._closed or not self._enter(False):
            raise self._refusal()
        self._owner = get_ident()
        try:
            yield
        finally:
            self._leave()

    def close(self) -> bool:
        """Let nobody in any more; return whether what the session holds may be given back now.

        It may not if it was given back before, nor in a child process: threads that it would wait for are the parent's.

        Raises:
            InputError: a call is running.
        """
        if self._closed or self._forks != _forks.count:
            self._closed = True
            return False
        with self.begun():
            self._closed = True
        return True

    def _own(self) -> None:
        if self._owner:
            self._leave()
            raise InputError(
                "the session is used by a second thread: the sequence that it holds is another thread's",
                hint="open one session per thread, they share the weights; "
                "or call reset() in this thread, which takes the session over",
            )
        self._owner = get_ident()

    def _refusal(self) -> InputError:
        if self._forks != _forks.count:
            return InputError(
                "the session was opened before a fork, in the parent process",
                hint="open the session in the child process, or start children with multiprocessing's 'spawn'",
            )
        if self._closed:
            return InputError("the session is closed", hint="open another one; they share the weights")
        if self._owner == get_ident():
            return InputError(
                "the session was called from within its own call",
                hint="a sampler or on_token may read it and set thresholds; to decode there, open another session",
            )
        return InputError(
            "the session is used by a second thread while a call is running",
            hint="open one session per thread; they share the weights",
        )
