"""Token streams: a decoding thread hands token ids to readers in other threads and event loops.

No side takes a lock that another one may hold. Single operations of deques, dicts, sets and simple queues are atomic.
So a reader may be interrupted, its event loop may be closed, and the garbage collector may end a stream on any thread,
within any call. Whoever waits leaves a bell. Ringing it runs no code of a caller, and never waits.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

from fastcar_compile.errors import InputError
from fastcar_compile.runtime.guard import forks
from fastcar_compile.support.values import number


class _LoopBell:
    """Wakes futures of one event loop, through a file descriptor that the loop watches: only the loop calls them.

    A future is weakly referenced: the futures of a loop that has ended would keep the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._rung, self._file = deque[ref[asyncio.Future[None]]](), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        finalize(self, os.close, self._file).atexit = False
        loop.add_reader(self._file, self._wake)
        _loop_bells[loop] = self

    def ring(self, future: ref[asyncio.Future[None]]) -> None:
        """Let the loop wake a future. Any thread may call this."""
        self._rung.append(future)
        with suppress(OSError):  # somebody closed every descriptor of the process
            os.eventfd_write(self._file, 1)

    def _wake(self) -> None:
        os.eventfd_read(self._file)
        while self._rung:
            future = self._rung.popleft()()
            if future is not None and not future.done():
                future.set_result(None)


_loop_bells = WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopBell]()
"""One for each event loop, so that a thousand streams of a loop need one descriptor."""


def _ring(bells: set[Callable[[], object]]) -> None:
    with suppress(KeyError):  # the set is empty
        while True:
            bells.pop()()


def _again(error: BaseException) -> Exception:
    """Return an error of the reader's own: threads that raise one object write into each other's traceback.

    An InputError names what would end a reader's thread, loop or task, or would look like the end of the tokens.
    """
    text = ""
    with suppress(Exception, SystemExit):  # a class of others, which may say and copy itself as it likes
        text = f": {error}"
        # A TimeoutError of `result` says that the sequence goes on.
        if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration | TimeoutError):
            found = copy.copy(error)
            if type(found) is type(error) and str(found) == str(error):
                return found
    return InputError(f"the sequence ended with {type(error).__name__}{text}")


class Shared:
    """What the sequences of a batcher share with its thread.

    Args:
        unread: ids of a sequence that may wait to be read.

    Attributes:
        going: the sequences that wait or decode, in the order in which they came. One that ends is not there any more.
        news: wakes the thread. error: what ended the batcher; None: nothing has. thread: decodes.
    """

    thread: threading.Thread
    error: BaseException | None = None

    def __init__(self, unread: int) -> None:
        self.unread, self.going, self.news, self._forks = unread, dict[Any, None](), SimpleQueue[None](), forks()

    def end(self, error: BaseException) -> None:
        """End every sequence."""
        self.error = self.error or error
        for tokens in list(self.going):
            tokens.end(self.error)
        self.news.put(None)

    def require_process(self) -> None:
        """Raise InputError in a child process: threads do not survive a fork."""
        if self._forks != forks():
            hint = "make a batcher in the child process, or start children with multiprocessing's 'spawn'"
            raise InputError("the batcher was made before a fork, in the parent process", hint=hint)

    def require_other_thread(self, what: str) -> None:
        """Raise InputError on the decoding thread, which would wait for itself."""
        if threading.current_thread() is self.thread:
            hint = "a sampler may cancel streams and submit sequences; wait in another thread"
            raise InputError(f"{what} was called by a sampler, and would wait for the thread that runs it", hint=hint)


class TokenQueue:
    """Token ids of one sequence on their way from the decoding thread to readers.

    Args:
        count: ids that the sequence has at its end.

    Attributes:
        ids: what nobody has read yet. ended: there will be no more; `error` says what ended them early.
        replayed: share of (token, layer) that replayed so far.
    """

    error: BaseException | None = None
    ended, replayed = False, 0.0

    def __init__(self, shared: Shared, count: int) -> None:
        self.shared, self.count, self.unread, self.ids = shared, count, shared.unread, deque[int]()
        self._at_next, self._at_end = set[Callable[[], object]](), set[Callable[[], object]]()

    @property
    def paused(self) -> bool:
        """Whether nothing is decoded before somebody reads."""
        return len(self.ids) >= self.unread

    def put(self, token: int) -> None:
        """Give an id to whoever waits."""
        self.ids.append(token)
        _ring(self._at_next)

    def end(self, error: BaseException | None = None) -> None:
        """Give the place to another sequence, and tell readers that nothing follows. The first end counts."""
        self.shared.going.pop(self, None)
        if not self.ended:
            self.error, self.ended = error, True
        _ring(self._at_next)
        _ring(self._at_end)
        self.shared.news.put(None)

    async def next(self) -> int:
        """Wait for the next id; see `TokenStream.__anext__`."""
        while True:
            ended = self.ended  # read first: what comes before the end is put before it
            with suppress(IndexError):
                token = self.ids.popleft()
                self.shared.news.put(None)  # the sequence may have been paused
                return token
            if ended:
                raise StopAsyncIteration if self.error is None else _again(self.error) from self.error
            self.shared.require_process()
            self.shared.require_other_thread("the next token of a stream")
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            bell = partial((_loop_bells.get(loop) or _LoopBell(loop)).ring, ref(future))
            self._at_next.add(bell)
            try:
                if not self.ids and not self.ended:
                    await future
            finally:
                self._at_next.discard(bell)

    def result(self, timeout: float) -> list[int]:
        """Wait for the end; see `TokenStream.result`. A timeout of -1 is none."""
        self.unread = self.count  # whoever waits for all of them takes them all
        self.shared.news.put(None)
        bell = threading.Lock()  # a simple queue's `get` may overlook a timeout of microseconds
        bell.acquire()
        self._at_end.add(bell.release)
        try:
            if not self.ended:
                self.shared.require_process()
                self.shared.require_other_thread("result()")
                if not bell.acquire(timeout=timeout):
                    raise TimeoutError(f"the sequence has not ended after {timeout:g} seconds, and goes on")
        finally:
            self._at_end.discard(bell.release)
        if self.error is not None:
            raise _again(self.error) from self.error
        found, self.ids = self.ids, deque[int]()
        return list(found)


class TokenStream:
    """The tokens of one sequence, as they are decoded: `async for token in stream`, or `stream.result()`.

    An `async for` that is left ends the sequence, and so does a stream that nobody holds any more.
    """

    def __init__(self, tokens: TokenQueue, read: TokenStream | None = None) -> None:
        self._tokens, self._read = tokens, read

    def __del__(self) -> None:
        what, hint = (
            "the `async for` over the stream was left, which ends its sequence",
            "read one token by anext(stream)",
        )
        self._tokens.end(None if self._read is None else InputError(what, hint=hint))

    @property
    def replay_ratio(self) -> float:
        """Share of (token, layer) that replayed so far."""
        return self._tokens.replayed

    def cancel(self) -> None:
        """End the sequence; its place goes to the next one. Tokens that were decoded can still be read."""
        self._tokens.end()

    async def aclose(self) -> None:
        """End the sequence as a generator ends, for `contextlib.aclosing`: nothing can be read any more."""
        self._tokens.end()
        self._tokens.ids, self._tokens.error = deque(maxlen=0), None

    def __aiter__(self) -> TokenStream:
        return TokenStream(self._tokens, self)  # only the loop holds it, so that it is gone where the loop is left

    async def __anext__(self) -> int:
        """Return the next token id.

        Raises:
            StopAsyncIteration: the sequence has ended.
            InputError: the batcher was closed, or made before a fork; or what else ended the sequence early, such as
                its sampler's error.
        """
        try:
            return await self._tokens.next()
        except BaseException:
            if self._read is not None:  # this leaves the loop, whose frame a kept traceback may keep
                self.__del__()
            raise
        finally:
            del self  # a cancelled task keeps its traceback, which would keep the stream

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end, and return all token ids that were not read yet.

        Args:
            timeout: seconds; None: any time.

        Raises:
            TimeoutError: the sequence has not ended; it goes on.
            InputError: the batcher was closed, or made before a fork, or a sampler calls this; or what else ended the
                sequence early, such as its sampler's error.
        """
        most = -1 if timeout is None else min(max(number("the timeout", timeout), 0), threading.TIMEOUT_MAX)
        try:
            return self._tokens.result(most)
        finally:
            del self  # as above, of whoever keeps a TimeoutError
