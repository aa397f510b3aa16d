"""What every command shares: exit codes, error reporting, progress and `--json`."""

from __future__ import annotations

import errno
import functools
import logging
import os
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from fastcar_compile.cli import BROKEN_PIPE, INTERRUPTED, RECEIVED, TERMINATED
from fastcar_compile.cli.output import interactive, print_json, stderr, visible
from fastcar_compile.cli.places import check_places
from fastcar_compile.errors import FastcarError, UserError
from fastcar_compile.support.values import LOGGER

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON value on stdout and nothing else; an error too.")
]


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    MISMATCH = 1
    USER_ERROR = 2
    INTERNAL_ERROR = 3
    INTERRUPTED = INTERRUPTED
    TERMINATED = TERMINATED

    @property
    def meaning(self) -> str:
        """What the code says, for `fastcar --help`."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.MISMATCH: "`verify` found a backend that differs, or `diff` a difference",
    ExitCode.USER_ERROR: "the call, the model or a file is wrong; the error says what, where and how to fix it",
    ExitCode.INTERNAL_ERROR: "a defect of fastcar_compile; FASTCAR_TRACEBACK=1 shows the traceback",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
    ExitCode.TERMINATED: "ended by SIGTERM",
}


_OF_THE_SYSTEM = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    }
)
"""What the operating system refuses because of its own state. Other errors of it are for their place to explain."""


def report_error(error: BaseException, as_json: bool) -> ExitCode:
    """Print an error without a traceback, on stderr or as {"error": …} on stdout, and return the exit code."""
    if isinstance(error, MemoryError):
        error = UserError("the memory does not suffice", hint="end other programs, or take a smaller model or batch")
    if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
        place = error.filename if isinstance(error.filename, str) else ""
        error = UserError(error.strerror or str(error), where=place, hint="make room, or correct the permissions")
    user = isinstance(error, UserError)
    code = ExitCode.USER_ERROR if user else ExitCode.INTERNAL_ERROR
    kind, text = type(error).__name__, str(error) or type(error).__name__
    if as_json:
        fields = error.to_json() if isinstance(error, FastcarError) else {"type": kind, "message": text}
        print_json({"error": fields | {"exit_code": int(code)}})
        return code
    _print_labelled("error" if user else "internal error", "bold red", text)
    if not user:
        named = "" if isinstance(error, FastcarError) else f"{kind}; "
        stderr().print(f"({named}a defect of fastcar_compile; set FASTCAR_TRACEBACK=1 for the traceback)", style="dim")
    return code


def _print_labelled(label: str, style: str, text: str, console: Console | None = None) -> None:
    from rich.markup import escape

    (console or stderr()).print(f"[{style}]{label}:[/] {escape(visible(text))}", soft_wrap=True)


def command(function: Callable[P, ExitCode]) -> Callable[P, None]:
    """Turn a function that returns an ExitCode into a typer command that reports every error in one form.

    The function must have a parameter `as_json`. Its paths are checked first: see `fastcar_compile.cli.places`.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            check_places(function, kwargs)
            code = function(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        except BrokenPipeError:
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            if RECEIVED:
                raise typer.Exit(RECEIVED[0]) from None
            _raise_if_asked(error)
            code = report_error(error, bool(kwargs.get("as_json")))
        raise typer.Exit(int(code))

    return wrapped


def _raise_if_asked(error: Exception) -> None:
    if os.environ.get("FASTCAR_TRACEBACK") and not isinstance(error, UserError):
        raise error


class _Lines(logging.Handler):
    """Prints warnings as labelled lines, and gives stages to `show`."""

    def __init__(self, level: int, console: Console, show: Callable[[str], None]) -> None:
        super().__init__(level)
        self._console, self._show = console, show

    def emit(self, record: logging.LogRecord) -> None:
        """Print or show one record."""
        if record.levelno >= logging.WARNING:
            _print_labelled("warning", "yellow", record.getMessage(), self._console)
        else:
            self._show(visible(record.getMessage(), lines=False))


@contextmanager
def _reports_to(handler: _Lines) -> Generator[None]:
    """Send the package's logger and Python's warnings to a handler."""

    def warned(message: Warning | str, *_rest: object) -> None:
        LOGGER.warning("%s", message)

    before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(handler.level)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = warned
            yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)


@contextmanager
def stages(as_json: bool, title: str) -> Generator[Callable[[str], None]]:
    """Show on stderr what the package's logger is told, and yield a function that tells it a stage of the command's.

    On a terminal a spinner has the stage and the elapsed time. Where stdout or stderr is no terminal, every stage that
    the library logs is one line, the command's own are none. With --json there are neither. A warning is always a line.
    """
    with ExitStack() as stack:
        if as_json or not interactive():
            console = stderr()
            handler = _Lines(
                logging.WARNING if as_json else logging.INFO,
                console,
                lambda text: console.print(f"{title}: {text}", markup=False, soft_wrap=True),
            )
        else:
            from rich.markup import escape
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            spinner = stack.enter_context(Progress(*columns, console=stderr(), transient=True))
            task = spinner.add_task(escape(title))
            handler = _Lines(
                logging.DEBUG,
                spinner.console,
                lambda text: spinner.update(task, description=escape(f"{title}: {text}")),
            )
        stack.enter_context(_reports_to(handler))
        yield functools.partial(LOGGER.debug, "%s")
