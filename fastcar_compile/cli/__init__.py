"""The `fastcar` command. One file per command; this file imports no other, so that Ctrl-C is met from the start."""

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

BROKEN_PIPE = 141
"""128 + SIGPIPE."""

TERMINATED = 143
"""128 + SIGTERM."""

_WORDS = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}


def main() -> None:
    """Run the command line of this process; the entry point of the console script.

    What ends a command early is an exception, so that `with` and `finally` clean up: SIGINT is Python's own
    KeyboardInterrupt, SIGTERM becomes SystemExit, and a reader that has gone, as in `fastcar inspect … | head`, is a
    BrokenPipeError.
    """
    try:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # a parent may have had it ignored
            signal.signal(signal.SIGTERM, _terminate)
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the shell: `>&-`
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until the end)
        from fastcar_compile.cli.commands import app as commands

        code = commands(prog_name="fastcar", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        code = end.code
    except OSError as error:  # of the standard output: commands report all others
        from fastcar_compile.cli.common import report_error

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what Python writes at its end
        code = BROKEN_PIPE if isinstance(error, BrokenPipeError) else report_error(error, as_json=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the work is done, and its exit code stands
    if code in _WORDS:
        print(_WORDS[code], file=sys.stderr)
    sys.exit(code)


def _terminate(_number: int, _frame: object) -> None:
    raise SystemExit(TERMINATED)


def __getattr__(name: str) -> object:
    """Return the typer application, which is built when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastcar_compile.cli.commands import app as commands

    return commands


__all__ = ["app", "main"]
