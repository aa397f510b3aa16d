"""The web server: the page, and one WebSocket per visitor. It answers to its own pages only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass
from threading import BoundedSemaphore, Thread
from time import monotonic
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from fastcar_compile.errors import InputError
from fastcar_play import limits
from fastcar_play.game import Stage
from fastcar_play.messages import ButtonPart, Ended, Full, Hello, parse_request
from fastcar_play.player import ASSETS, path_of
from fastcar_play.recording import most_frames
from fastcar_play.visit import Visit

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""The page loads from this server only, and stands in no other page's frame."""

RATE, BURST = 300.0, 600.0
"""Messages of one page per second, lately and at once. A page draws 120 frames per second at most."""

GAME = "fastcar-game"
"""Name of the threads that play."""

OUTBOX = 16
"""Messages that wait for a page that does not read, from which on its game waits."""

POLICY_VIOLATION, TOO_BIG, TRY_AGAIN = 1008, 1009, 1013
"""Close codes of RFC 6455 and of the IANA registry."""


class Budget:
    """A token bucket: `RATE` messages per second, and `BURST` at once."""

    def __init__(self, now: float) -> None:
        self._left, self._time = BURST, now

    def take(self, now: float) -> bool:
        """Take one message; False: there were too many."""
        self._left = min(BURST, self._left + (now - self._time) * RATE) - 1
        self._time = now
        return self._left >= 0


@dataclass(frozen=True)
class OwnNames:
    """The names by which this server is reached.

    Another name that leads here is a page's of somebody else, who had it point to this machine (DNS rebinding).
    An address cannot be made to do that.
    """

    names: frozenset[str]

    @classmethod
    def of(cls, host: str) -> OwnNames:
        """Return the names of a server that listens at `host`."""
        here = socket.gethostname().lower()
        return cls(frozenset({"localhost", here, f"{here}.local", host.lower()}))

    def has(self, host: str | None) -> bool:
        """Return whether a Host header names this server."""
        try:
            name = urlsplit(f"//{host or ''}").hostname or ""
        except ValueError:
            return False
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def same_origin(headers: Headers) -> bool:
    """Return whether a WebSocket is opened by a page of this server."""
    try:
        origin = urlsplit(headers.get("origin", ""))
    except ValueError:
        return False
    return origin.scheme in ("http", "https") and bool(origin.netloc) and origin.netloc == headers.get("host")


class Guarded:
    """Refuses requests under other names, and adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp, own: OwnNames) -> None:
        self._app, self._own = app, own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; see ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if not self._own.has(Headers(scope=scope).get("host")):
            refusal = PlainTextResponse("this server has another name", 421)
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


class Theatre:
    """The games of all visitors.

    Attributes:
        visitors: places.
    """

    def __init__(self, stage: Stage, visitors: int) -> None:
        self._stage, self.visitors = stage, visitors
        self._places = BoundedSemaphore(visitors)
        self._hello = hello(stage).model_dump_json()

    async def visit(self, websocket: WebSocket) -> None:
        """Play with one page, from its opening to its end."""
        if not same_origin(websocket.headers):
            await websocket.close(POLICY_VIOLATION)
            return
        await websocket.accept()
        if not self._places.acquire(blocking=False):
            await websocket.send_text(Full(visitors=self.visitors).model_dump_json())
            await websocket.close(TRY_AGAIN)
            return
        await self._played(websocket)

    async def _played(self, websocket: WebSocket) -> None:
        outbox = asyncio.Queue[str | bytes | None]()
        loop = asyncio.get_running_loop()

        def put(item: str | bytes | None) -> None:
            with suppress(RuntimeError):  # the server has ended, and its loop with it
                loop.call_soon_threadsafe(outbox.put_nowait, item)

        visit = Visit(self._stage, put, lambda: outbox.qsize() >= OUTBOX)

        def play() -> None:
            try:
                visit.run()
            finally:
                self._places.release()
                put(None)

        outbox.put_nowait(self._hello)
        Thread(target=play, name=GAME, daemon=True).start()
        ends = [asyncio.create_task(_read(websocket, visit)), asyncio.create_task(_write(websocket, outbox))]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            visit.stop()
            for task in ends:
                task.cancel()


async def _read(websocket: WebSocket, visit: Visit) -> None:
    """Hand the page's messages to its game, until it closes or says what no page says."""
    budget = Budget(monotonic())
    with suppress(WebSocketDisconnect):
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None or len(text) > limits.MESSAGE_BYTES:
                await _end(websocket, "the page sent what no page sends", TOO_BIG)
                return
            try:
                request = parse_request(text)
            except InputError as error:
                await _end(websocket, error.what, POLICY_VIOLATION)
                return
            if not budget.take(monotonic()) or not visit.post(request):
                await _end(websocket, "the page sent too many messages", POLICY_VIOLATION)
                return


async def _end(websocket: WebSocket, reason: str, code: int) -> None:
    await websocket.send_text(Ended(reason=reason).model_dump_json())
    await websocket.close(code)


async def _write(websocket: WebSocket, outbox: asyncio.Queue[str | bytes | None]) -> None:
    """Send what the game says, until it ends."""
    with suppress(WebSocketDisconnect, RuntimeError):  # RuntimeError: closed meanwhile
        while (item := await outbox.get()) is not None:
            if isinstance(item, str):
                await websocket.send_text(item)
            else:
                await websocket.send_bytes(item)
        if websocket.application_state is WebSocketState.CONNECTED:
            await websocket.close()


def hello(stage: Stage) -> Hello:
    """Return the first message to a page."""
    file = stage.world.file
    return Hello(
        world=file.name,
        artifact=stage.name,
        gate=stage.gate,
        spared=stage.spared,
        tokens_per_frame=file.tokens_per_frame,
        frames_per_second=file.frames_per_second,
        size=file.image.size,
        aspect=file.image.aspect,
        grid=file.image.grid,
        buttons=tuple(ButtonPart(name=name, keys=tuple(keys)) for name, keys in file.buttons.items()),
        starts=stage.world.names,
        codes=file.image.count,
        levels=stage.replay.levels,
        record_frames=most_frames(file.image),
    )


def application(stage: Stage, visitors: int, host: str) -> ASGIApp:
    """Return the server's application.

    Args:
        visitors: players at most. host: where it listens.
    """
    content = {name: path_of(name).read_bytes() for name in ASSETS}

    async def page(request: Request) -> Response:
        return Response(content["play.html"], media_type="text/html")

    async def asset(request: Request) -> Response:
        name: str = request.path_params["name"]
        if name not in content:
            return PlainTextResponse("there is no such file", 404)
        return Response(content[name], media_type=ASSETS[name])

    theatre = Theatre(stage, visitors)
    routes = [Route("/", page), Route("/static/{name}", asset), WebSocketRoute("/play", theatre.visit)]
    return Guarded(Starlette(routes=routes), OwnNames.of(host))
