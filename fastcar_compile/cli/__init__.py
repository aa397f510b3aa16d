"""The `fastcar` command. One file per command; this file imports nothing, so that Ctrl-C is met from the start."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    app: typer.Typer

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

TERMINATED = 143
"""128 + SIGTERM."""

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_RESTORED = b"\r\x1b[2K\x1b[?25h"
"""Takes a spinner off its line, and shows the cursor."""


def main() -> None:
    """Run the command line of this process; the entry point of the console script."""
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is under nohup, and in the background of a script
            signal.signal(number, _end)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `fastcar inspect … | head` ends without a word
    from fastcar_compile.cli.commands import app as commands

    try:
        commands(prog_name="fastcar")
    finally:
        for number in _WORDS:
            signal.signal(number, signal.SIG_IGN)  # the work is done, and its exit code stands


def _end(number: int, _frame: object) -> None:
    """Undo what is under way and end the process. No exception: libraries would swallow it, or print it."""
    undo = sys.modules.get("fastcar_compile.undo")
    if not hasattr(undo, "undo_all"):  # it may be in the middle of its import
        undo = None
    if undo is not None and undo.postponed(number):
        return
    for each in _WORDS:
        signal.signal(each, signal.SIG_IGN)
    if undo is not None:
        undo.undo_all()
    if os.isatty(2):
        os.write(2, _RESTORED)
    os.write(2, f"{_WORDS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def __getattr__(name: str) -> object:
    """Return the typer application, which is built when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastcar_compile.cli.commands import app as commands

    return commands


__all__ = ["app", "main"]
