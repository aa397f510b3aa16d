"""uvicorn around the application: the port, the thread, the end."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from threading import enumerate as threads

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastcar_compile.errors import InputError, InternalError
from fastcar_play import limits
from fastcar_play.game import Stage
from fastcar_play.server import GAME, application

SPARE = 32
"""Connections beyond those of players: pages, and visitors who are told that it is full."""

REQUEST_SECONDS = 10.0
"""From a connection to its first request."""

END_SECONDS = 5.0
"""For the last frame of a game whose page is gone."""

UNREAD_SECONDS = 60
"""A connection that reads nothing for so long is closed by the kernel."""


class _Bounded(H11Protocol):
    """HTTP that closes connections without a request, of which a few dozen would take all places."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._closed_unless_asked)

    def _closed_unless_asked(self) -> None:
        if self.scope is None:
            self.transport.close()


@dataclass(frozen=True)
class Listening:
    """A server that answers. url: of its page. wait: returns when it has ended."""

    url: str
    server: uvicorn.Server
    thread: Thread

    def wait(self) -> None:
        """Wait until the server ends, which it does not by itself.

        Raises:
            InternalError: it has ended.
        """
        while self.thread.is_alive():
            self.thread.join(timeout=1.0)  # a signal is handled in between
        raise InternalError("the web server has ended by itself")


@contextmanager
def serving(stage: Stage, *, host: str, port: int, visitors: int) -> Generator[Listening]:
    """Yield a server that answers at `host`; it ends with the block, and all games with it.

    Args:
        port: 0 is a free one. visitors: players at most.

    Raises:
        InputError: it cannot listen there.
    """
    listener = _listener(host, port)
    with listener:  # it listens already: whoever connects before the server has started waits for it
        config = uvicorn.Config(
            application(stage, visitors, host),
            http=_Bounded,
            ws="websockets-sansio",
            lifespan="off",  # the application has none, and older versions print a traceback where Ctrl-C ends it
            ws_max_size=limits.MESSAGE_BYTES,
            ws_per_message_deflate=False,  # PNG is compressed
            limit_concurrency=visitors + SPARE,
            timeout_graceful_shutdown=1,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        server = uvicorn.Server(config)
        # In a thread of its own uvicorn leaves signals alone: Ctrl-C ends this command as it ends the others.
        thread = Thread(target=server.run, args=([listener],), name="fastcar-server", daemon=True)
        thread.start()
        try:
            yield Listening(_url(host, listener.getsockname()[1]), server, thread)
        finally:
            server.should_exit = True
            thread.join()
            # The process would be aborted where libraries end before a game that uses them.
            for game in (one for one in threads() if one.name == GAME):
                game.join(END_SECONDS)


def _listener(host: str, port: int) -> socket.socket:
    hint = "give --host an address of this machine, and --port another number, or 0 for a free one"
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError, OverflowError) as error:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"the server cannot listen: {text}", where=f"{host}:{port}", hint=hint) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)  # connections inherit it
    return listener


def _url(host: str, port: int) -> str:
    """Return the address for a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"
