"""The server: who may talk to it, how much, and what a visitor gets; then the page in Chromium."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
from conftest import check_tool
from inspection.browser import browsing
from PIL import Image
from starlette.datastructures import Headers
from starlette.testclient import TestClient, WebSocketDenialResponse, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from fastcar_compile.errors import InputError
from fastcar_play import serve, server
from fastcar_play.game import Stage
from fastcar_play.serve import serving
from fastcar_play.server import ASSETS, BURST, HEADERS, Budget, OwnNames, application, same_origin

from .worlds import COLOURS

if TYPE_CHECKING:
    pass

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
OWN = {"host": HOST, "origin": f"http://{HOST}"}


@pytest.fixture
def client(stage: Stage) -> Iterator[TestClient]:
    """A client of a server with two places."""
    with TestClient(application(stage, 2, HOST), base_url=f"http://{HOST}") as client:
        yield client


@contextmanager
def visiting(client: TestClient, **headers: str) -> Iterator[WebSocketTestSession]:
    with client.websocket_connect("/play", headers=OWN | headers) as player:
        yield player


def received(player: WebSocketTestSession, kind: str) -> tuple[dict[str, Any], bytes]:
    """The next message of a kind, and what is behind its header."""
    while True:
        item = player.receive()
        if item["type"] == "websocket.close":
            raise WebSocketDisconnect(item["code"])
        data: bytes | None = item.get("bytes")
        if data is None:
            header, body = json.loads(item["text"]), b""
        else:
            (length,) = struct.unpack_from("<I", data)
            header, body = json.loads(data[4 : 4 + length]), data[4 + length :]
        if header["type"] == kind:
            return header, body


def ask(player: WebSocketTestSession, kind: str, **fields: Any) -> None:
    player.send_text(json.dumps({"type": kind, **fields}))


def test_the_page_needs_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name, kind in ASSETS.items():
        answer = client.get(f"/static/{name}")
        assert answer.headers["content-type"].startswith(kind)
        assert HEADERS.items() <= answer.headers.items()
        assert "http" not in answer.text.replace("http://www.w3.org/", "").replace('"https:"', "")
    assert client.get("/static/nothing.js").status_code == 404
    assert client.get("/static/..%2fserver.py").status_code == 404


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *(("127.0.0.1:80", True), ("[::1]:8000", True), ("192.168.0.7", True), ("LOCALHOST:1", True)),
        *(("evil.example", False), ("127.0.0.1.evil.example", False), ("", False), (None, False), ("[::1", False)),
    ],
)
def test_another_name_is_refused(host: str | None, own: bool) -> None:
    assert OwnNames.of(HOST).has(host) is own


def test_a_rebound_name_gets_nothing(client: TestClient) -> None:
    evil = {"host": "evil.example", "origin": "http://evil.example"}
    assert client.get("/", headers=evil).status_code == 421
    with pytest.raises(WebSocketDenialResponse) as caught:
        client.websocket_connect("/play", headers=evil).__enter__()
    assert caught.value.status_code == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", f"http://{HOST}:1", "file://", "http://[::1"])
def test_another_page_cannot_play(client: TestClient, origin: str) -> None:
    assert not same_origin(Headers({"host": HOST, "origin": origin}))
    with pytest.raises(WebSocketDisconnect) as caught:
        client.websocket_connect("/play", headers=OWN | {"origin": origin}).__enter__()
    assert caught.value.code == 1008


def test_frames_answer_to_keys_and_come_as_png(client: TestClient) -> None:
    with visiting(client) as player:
        hello, _ = received(player, "hello")
        assert (hello["world"], hello["starts"], len(hello["levels"])) == ("Tiny", ["the hall", "the yard"], 101)
        first, body = received(player, "frame")
        assert (first["number"], first["sides"][0]["replayed"]) == (0, [])
        status, _ = received(player, "status")
        assert (status["mode"], status["threshold"], status["running"]) == ("replay", "compiled", False)
        ask(player, "limit", value=False)
        while status["limited"]:
            status, _ = received(player, "status")
        ask(player, "mode", value="both")
        ask(player, "record", value=True)
        ask(player, "keys", held=["left"])
        ask(player, "run", value=True)
        frame, body = received(player, "frame")
        while frame["number"] < 5:
            ask(player, "drawn", serial=frame["serial"])
            frame, body = received(player, "frame")
        assert (frame["action"], [side["side"] for side in frame["sides"]]) == ("turn left", ["dense", "replay"])
        assert sum(side["bytes"] for side in frame["sides"]) == len(body)
        with Image.open(io.BytesIO(body[: frame["sides"][0]["bytes"]])) as picture:
            pixels = np.asarray(picture).reshape(-1, 3)
        assert {tuple(pixel) for pixel in pixels.tolist()} <= {tuple(colour) for colour in COLOURS.tolist()}
        ask(player, "record", value=False)
        recording, gif = received(player, "recording")
        assert (recording["name"], gif[:6]) == ("game.gif", b"GIF89a")


@pytest.mark.parametrize(
    ("text", "code"), [("x" * 5000, 1009), ("{}", 1008), ('{"type":"run","value":1}', 1008), (b"\0", 1009)]
)
def test_what_no_page_sends_ends_the_visit(client: TestClient, text: str | bytes, code: int) -> None:
    with visiting(client) as player:
        player.send({"type": "websocket.receive", "text" if isinstance(text, str) else "bytes": text})
        with pytest.raises(WebSocketDisconnect) as caught:
            received(player, "nothing")
    assert caught.value.code == code


def test_too_many_messages_end_the_visit(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(0.0)
    assert all(budget.take(0.0) for _ in range(int(BURST)))
    assert not budget.take(0.0)
    assert budget.take(1.0)
    monkeypatch.setattr(server, "RATE", 0.0)
    with visiting(client) as player:
        for _ in range(int(BURST) + 1):
            ask(player, "drawn", serial=0)
        assert "too many messages" in received(player, "ended")[0]["reason"]


def test_places_are_limited_and_free_again(client: TestClient) -> None:
    with visiting(client) as one, visiting(client) as two:
        for player in (one, two):
            received(player, "frame")
        with visiting(client) as third:
            assert received(third, "full")[0]["visitors"] == 2
            with pytest.raises(WebSocketDisconnect) as caught:
                received(third, "nothing")
        assert caught.value.code == 1013
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with visiting(client) as again:
            if again.receive_json()["type"] == "hello":
                return
        time.sleep(0.05)
    pytest.fail("no place was given back")


def test_idle_connections_give_their_places_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.5)
    with serving(stage, host=HOST, port=0, visitors=1) as listening, ExitStack() as idle:
        address = (HOST, urlsplit(listening.url).port)
        for _ in range(60):
            idle.enter_context(socket.create_connection(address))
        status, deadline = 503, time.monotonic() + 30
        while status == 503 and time.monotonic() < deadline:
            with suppress(HTTPError), urlopen(listening.url) as answer:
                status = answer.status
            time.sleep(0.1)
    assert status == 200


def test_a_port_that_is_taken_is_a_named_error(stage: Stage) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match="cannot listen: Address already in use") as caught:
            serving(stage, host=HOST, port=port, visitors=1).__enter__()
        assert caught.value.where == f"{HOST}:{port}"
    with pytest.raises(InputError, match="cannot listen"):
        serving(stage, host="no host", port=0, visitors=1).__enter__()


@contextmanager
def playing(built: tuple[Path, Path]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real command, and the address of its page."""
    artifact, world = built
    words = [sys.executable, "-m", "fastcar_compile", "play", str(artifact), "--world", str(world), "--json"]
    words += ["--visitors", "30"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                text += process.stdout.readline()
            yield process, json.loads(text)["url"]
        finally:
            process.kill()


def test_a_page_that_is_reloaded_leaves_the_command_running_and_ctrl_c_ends_it(built: tuple[Path, Path]) -> None:
    """The server writes its first messages to connections that the browser has just closed. Then the page is played."""
    with playing(built) as (process, url), browsing(url, 1) as (page,):
        for _ in range(20):
            page.goto(url, wait_until="commit")
        page.goto(url)
        page.wait_for_selector("body[data-state=paused]")
        page.get_by_label("Side by side").check()
        page.keyboard.down("ArrowLeft")
        deadline = time.monotonic() + 60
        while "turn left" not in page.inner_text("#parts") or page.get_attribute("body", "data-frame") == "1":
            assert time.monotonic() < deadline, "the game does not follow the key"
            page.wait_for_timeout(20)
        assert page.locator("canvas.image").count() == 2
        assert process.poll() is None
        assert url.startswith(f"http://{HOST}:")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "interrupted\n"


def test_make_play_serves_the_shipped_page() -> None:
    """With any Python, and without an environment."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    words = [check_tool("make"), "--no-print-directory", "play", f"PYTHON={sys.executable} -I", f"PORT={port}"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            url = re.findall(r"http:[^ ]*", process.stdout.readline())[0]
            for _ in range(100):
                with suppress(OSError), urlopen(url) as answer:
                    assert "<title>fastcar play</title>" in answer.read().decode()
                    break
                time.sleep(0.1)
            else:
                pytest.fail("no page within ten seconds")
        finally:
            os.killpg(process.pid, signal.SIGINT)
