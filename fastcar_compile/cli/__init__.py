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


def main() -> None:
    """Run the command line of this process; the entry point of the console script."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `fastcar inspect … | head` ends without a word
    try:
        from fastcar_compile.cli.commands import app as commands

        commands(prog_name="fastcar")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)  # half-imported libraries cannot be relied on to shut down


def __getattr__(name: str) -> object:
    """Return the typer application, which is built when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastcar_compile.cli.commands import app as commands

    return commands


__all__ = ["app", "main"]
