"""The `fastcar` command. This file imports no other, so that Ctrl-C is met from the start."""

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

RECEIVED: list[int] = []
"""Exit codes of the signals that came. Libraries may make another error of the exception, such as an ImportError."""

_WORDS = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}


def main() -> None:
    """Run the command line of this process; the entry point of the console script.

    What ends a command early is an exception, so that `with` and `finally` clean up: SIGINT is KeyboardInterrupt,
    SIGTERM is SystemExit, and a reader that has gone, as in `fastcar inspect … | head`, is BrokenPipeError.
    """
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as it is in the background of a script
                signal.signal(number, _raise)
        signal.signal(signal.SIGALRM, _raise)
        sys.unraisablehook = _raise_later
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
    code = RECEIVED[0] if RECEIVED else code
    if code in _WORDS:
        print(_WORDS[code], file=sys.stderr)
    sys.exit(code)


def _raise(number: int, _frame: object) -> None:
    if number != signal.SIGALRM:
        RECEIVED.append(128 + number)
    raise KeyboardInterrupt if RECEIVED[0] == INTERRUPTED else SystemExit(TERMINATED)


def _raise_later(ignored: sys.UnraisableHookArgs) -> None:
    """Raise a signal's exception again where it came inside of a finaliser or a callback, which can pass none on."""
    if not RECEIVED:
        sys.__unraisablehook__(ignored)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.01)


def __getattr__(name: str) -> object:
    """Return the typer application, which is built when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastcar_compile.cli.commands import app as commands

    return commands


__all__ = ["app", "main"]
