"""What every command shares: output forms, exit codes, error reporting, progress."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastcar_compile.errors import FastcarError, UserError

P = ParamSpec("P")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    MISMATCH = 1
    USER_ERROR = 2
    INTERNAL_ERROR = 3


def stdout() -> Console:
    """The console for results; made per call, so that a redirected stdout is honoured."""
    return Console(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """The console for errors and progress."""
    return Console(file=sys.stderr, highlight=False)


def print_table(table: Table) -> None:
    """A table at its natural width: nothing is cut off when stdout is a file or a narrow terminal."""
    wide = Console(file=sys.stdout, width=10_000)
    width = Measurement.get(wide, wide.options, table).maximum
    Console(file=sys.stdout, highlight=False, width=width).print(table, soft_wrap=True)


def jsonable(value: Any) -> Any:
    """`value` as plain JSON: dataclasses, paths, numpy scalars and arrays included; infinities and NaN as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def print_json(value: Any) -> None:
    """One JSON object on stdout, never wrapped or coloured."""
    sys.stdout.write(json.dumps(jsonable(value), indent=2, sort_keys=True, allow_nan=False) + "\n")


def report_error(error: BaseException, as_json: bool) -> ExitCode:
    """Prints an error without a traceback (on stderr, or as {"error": …} on stdout) and returns the exit code."""
    user = isinstance(error, UserError)
    code = ExitCode.USER_ERROR if user else ExitCode.INTERNAL_ERROR
    kind, text = type(error).__name__, str(error) or type(error).__name__
    if as_json:
        fields = {"type": kind, "message": text, "exit_code": int(code)}
        if isinstance(error, UserError):
            fields |= {"message": error.what, "where": error.where, "hint": error.hint}
        print_json({"error": fields})
        return code
    title = "error" if user else "internal error"
    console = stderr()
    console.print(f"[bold red]{title}:[/] {escape(text)}", soft_wrap=True)
    if not user:
        named = "" if isinstance(error, FastcarError) else f"{kind}; "
        console.print(f"[dim]({named}a defect of fastcar_compile; set FASTCAR_TRACEBACK=1 for the traceback)[/]")
    return code


def command(function: Callable[P, ExitCode]) -> Callable[P, None]:
    """Turns a function that returns an ExitCode into a typer command that reports every error in the one form.

    The function must have a parameter `as_json`.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            stderr().print("interrupted")
            raise typer.Exit(130) from None
        except Exception as error:
            _raise_if_asked(error)
            code = report_error(error, bool(kwargs.get("as_json")))
        raise typer.Exit(int(code))

    return wrapped


def _raise_if_asked(error: Exception) -> None:
    if os.environ.get("FASTCAR_TRACEBACK") and not isinstance(error, UserError):
        raise error


@contextmanager
def _warnings_to(console: Console) -> Iterator[None]:
    def show(message: Warning | str, *_rest: object) -> None:
        console.print(f"[yellow]warning:[/] {escape(str(message))}", soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def stages(as_json: bool, title: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with the elapsed time; yields a function that sets its text. No spinner with --json.

    Warnings inside the block are one line each on stderr.
    """
    console = stderr()
    if as_json:
        with _warnings_to(console):
            yield lambda text: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, _warnings_to(progress.console):
        task = progress.add_task(escape(title))

        def show(text: str) -> None:
            progress.update(task, description=escape(f"{title}: {text}"))

        yield show


def parse_thresholds(text: str) -> float | list[float | None]:
    """A threshold option: one number, or one per layer separated by commas; "inf", "-inf" and "none" are allowed.

    "none" (never replay) alone is inf.

    Raises:
        UserError: a part is not a number.
    """
    parts = [part.strip().lower() for part in text.split(",")]
    values = [_threshold(part, text) for part in parts]
    if len(values) > 1:
        return values
    return math.inf if values[0] is None else values[0]


def _threshold(part: str, whole: str) -> float | None:
    if part == "none":
        return None
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UserError(
            f"{part!r} is not a threshold",
            where=f"--threshold {whole}",
            hint="give a number, inf, -inf, or one of these per layer, separated by commas ('none': never replay)",
        )
    return value


def require_one(options: Sequence[tuple[str, bool]]) -> None:
    """Refuses more than one of the given options together.

    Raises:
        UserError: two or more are set.
    """
    given = [name for name, is_set in options if is_set]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} cannot be given together", hint="choose one of them")


def existing(path: Path, what: str) -> Path:
    """`path`, if it exists.

    Raises:
        UserError: it does not.
    """
    if not path.exists():
        raise UserError(f"the {what} does not exist", where=str(path))
    return path
