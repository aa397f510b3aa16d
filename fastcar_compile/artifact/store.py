"""An HTTP store of files, which answers GET and PUT. One that is slow, endless or lies about sizes holds nobody up."""

import shutil
import socket
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.parse import urlsplit

from fastcar_compile.artifact.digest import private_folder
from fastcar_compile.ir.tensor_files import CHUNK
from fastcar_compile.support import limits
from fastcar_compile.support.files import open_plain, replacing

_SECONDS = 30
"""Time that a store may take to connect, and then for a request besides its bytes."""

_RATE = 1_000_000
"""Bytes per second that a store must give and take."""


def download(url: str, path: Path, most: int) -> None:
    """Write a file of a store.

    Args:
        most: bytes that it may have.

    Raises:
        FileNotFoundError: the store has no such file. OSError, ValueError, HTTPException: it gives none, or the file
            is late or too large, or cannot be written.
    """
    private_folder(path.parent)
    with replacing(path, 0o444) as stream:
        if most > min(limits.CACHE_BYTES, shutil.disk_usage(path.parent).free):
            raise ValueError(f"there is no room for {most:,} bytes")
        with _answer("GET", url, most) as answer:
            while block := answer.read(CHUNK):
                most -= len(block)
                if most < 0:
                    raise ValueError("it is larger than it should be")
                stream.write(block)


def upload(url: str, path: Path) -> None:
    """Put a file into a store.

    Raises:
        OSError, ValueError, HTTPException: the store does not take it.
    """
    size = path.stat().st_size
    headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
    with open_plain(path) as stream, _answer("PUT", url, size, body=stream, headers=headers):
        pass


@contextmanager
def _answer(method: str, url: str, size: int, **content: Any) -> Generator[HTTPResponse]:
    """Yield the answer to a request that has `size` bytes. A redirection is a refusal: it may lead anywhere."""
    parts, seconds = urlsplit(url), _SECONDS + size / _RATE
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    with closing(kind(parts.netloc, timeout=_SECONDS)) as connection:
        connection.connect()
        # The timeout of a socket is that of each operation, and an answer of one byte at a time has many.
        late = Timer(seconds, _shut, [connection.sock])
        late.daemon = True
        late.start()
        try:
            connection.request(method, parts.path, **content)
            with connection.getresponse() as answer:
                if answer.status // 100 != 2:
                    error = FileNotFoundError if answer.status == 404 else OSError
                    raise error(f"it answers {answer.status} {answer.reason:.80}")
                yield answer
        finally:
            if late.finished.is_set():
                raise TimeoutError(f"it takes more than {seconds:.0f} s")
            late.cancel()


def _shut(connected: socket.socket) -> None:
    """End every wait for this socket."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
