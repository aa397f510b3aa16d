"""What commands share: exit codes, errors in the words of the call, progress, `--json`, and the checks of paths."""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, cast, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from fastcar_compile.cli import BROKEN_PIPE, INTERRUPTED, RECEIVED, TERMINATED
from fastcar_compile.cli.output import interactive, print_json, stderr, visible
from fastcar_compile.config.listing import Needs, Without, described
from fastcar_compile.config.options import PARTS, option_words
from fastcar_compile.errors import CompileError, FastcarError, UserError, os_errors
from fastcar_compile.support.values import LOGGER, check_current_folder

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON value on stdout and nothing else; an error too.")
]


class ExitCode(IntEnum):
    """Exit codes of every command. meaning: what the code says, for `fastcar --help`."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        """Return the member of a code."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    OK = 0, "done"
    MISMATCH = 1, "`verify` found a backend that differs, `diff` a difference, or `hls-report` a figure that is worse"
    USER_ERROR = 2, "the call, the model or a file is wrong; the error says what, where and how to fix it"
    INTERNAL_ERROR = 3, "a defect of fastcar_compile; FASTCAR_TRACEBACK=1 shows the traceback"
    INTERRUPTED = INTERRUPTED, "interrupted by Ctrl-C"
    TERMINATED = TERMINATED, "ended by SIGTERM"


_OF_THE_SYSTEM = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
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


def command(function: Callable[P, ExitCode | None]) -> Callable[P, None]:
    """Turn a function that returns an ExitCode, or None for OK, into a typer command that reports every error.

    The function must have a parameter `as_json`. Its docstring's `Args:` are the help of its options: see
    `document`. Its paths are checked first: see `check_places`.
    """
    document(function)
    marks: Marks = {name: getattr(hint, "__metadata__", ()) for name, hint in function.__annotations__.items()}

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            check_current_folder()
            check_effects(marks, kwargs)
            check_places(marks, kwargs)
            code = function(*args, **kwargs) or ExitCode.OK
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        except BrokenPipeError:
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            if RECEIVED:
                raise typer.Exit(RECEIVED[0]) from None
            if os.environ.get("FASTCAR_TRACEBACK") and not isinstance(error, UserError):
                raise
            told = in_words_of(CALL.get(), error) if isinstance(error, UserError) else error
            code = report_error(told, bool(kwargs.get("as_json")))
        raise typer.Exit(int(code))

    return wrapped


def document(function: Callable[..., Any]) -> None:
    """Give every parameter that the docstring's `Args:` name its typer option, with the text as help.

    A parameter without a default is an argument, and a bool that is False is a flag. Others are told by an `Option` or
    an `Argument` in the annotation, which gets the help. The command's own help is the docstring before `Args:`.
    """
    summary, entries = described(function)
    hints, parameters = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
    for name, text in entries.items():
        kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        given = [mark for mark in marks if isinstance(mark, ParameterInfo)]
        default = parameters[name].default
        if given:
            option = copy(given[0])
        elif default is inspect.Parameter.empty:
            option = typer.Argument()
        else:
            option = typer.Option(*([f"--{name}".replace("_", "-")] if default is False else ()))
        option.help = text
        hints[name] = Annotated[kind, option, *(mark for mark in marks if mark not in given)]
    function.__annotations__, function.__doc__ = hints, summary
    noted = [item.replace(annotation=hints[item.name]) for item in parameters.values()]
    vars(function)["__signature__"] = inspect.Signature(noted)


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


def _warned(message: Warning | str, *_where: object) -> None:
    LOGGER.warning("%s", message)


@contextmanager
def stages(as_json: bool, title: str, first: str = "") -> Generator[Callable[[str], None]]:
    """Show on stderr what the package's logger is told, and yield a function that tells it a stage of the command's.

    Args:
        title: the command's name. first: the stage that the block begins with.

    On a terminal a spinner has the stage and the elapsed time. Where stdout or stderr is no terminal, every stage that
    the library logs is one line, the command's own are none. With --json there are neither. A warning is always a line.
    """
    with ExitStack() as stack:
        if as_json or not interactive():
            level, out = logging.WARNING if as_json else logging.INFO, stderr()
            handler = _Lines(level, out, lambda text: out.print(f"{title}: {text}", markup=False, soft_wrap=True))
        else:
            from rich.markup import escape
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            spinner = stack.enter_context(Progress(*columns, console=stderr(), transient=True))
            show = functools.partial(spinner.update, spinner.add_task(escape(title)))
            handler = _Lines(logging.DEBUG, spinner.console, lambda text: show(description=escape(f"{title}: {text}")))
        stack.enter_context(warnings.catch_warnings())
        warnings.showwarning = _warned
        stack.callback(LOGGER.setLevel, LOGGER.level)
        stack.callback(LOGGER.removeHandler, handler)
        LOGGER.addHandler(handler)
        LOGGER.setLevel(handler.level)
        if first:
            LOGGER.debug("%s", first)
        yield functools.partial(LOGGER.debug, "%s")


# The files and folders of a command: none that it writes is one that it reads, and each can be made. An option that
# writes says so in its annotation: `Annotated[Path, Option(...), Writes("trace")]`. Every other path is read.


@dataclass(frozen=True)
class Writes:
    """Marks an option whose path is written.

    Args:
        what: the file in an error, for example "trace".
        folder: it is a folder, whose writer makes those above it too.
    """

    what: str = "output"
    folder: bool = False


class MayRead:
    """Marks an option of text that may name a file, alone or before a colon."""


Marks = Mapping[str, tuple[Any, ...]]
"""Parameter of a command -> what its annotation says beside its type."""


def check_places(marks: Marks, given: Mapping[str, object]) -> None:
    """Raise unless every output of a command has a folder, and none would overwrite an input or another output.

    Raises:
        UserError: with the option, the path and what to do.
    """
    paths = {name: [*_paths(given.get(name), marks[name])] for name in marks}
    written = {name: mark for name in marks for mark in marks[name] if isinstance(mark, Writes)}
    for name, mark in written.items():
        for path in paths[name]:
            for other, places in paths.items():
                if other != name and any(_overwrites(path, place, other not in written) for place in places):
                    what = f"--{name} would overwrite {other}".replace("_", "-")
                    raise UserError(what, where=str(path), hint="give a place of its own")
            _check_folder(path, mark)


def _paths(value: object, marks: tuple[Any, ...]) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, list):
        yield from (item for item in cast("list[object]", value) if isinstance(item, Path))
    elif isinstance(value, str) and any(isinstance(mark, MayRead) for mark in marks):
        named = (Path(part) for part in (value, value.rpartition(":")[0]) if part)
        yield from (path for path in named if path.is_file())  # else it is a name: `--target cpu -o cpu`


def _overwrites(output: Path, other: Path, read: bool) -> bool:
    """Whether an output is the same file or folder, through links too.

    Args:
        read: it may be no file in an input's folder either, nor a new one in an artifact, which has no other files.
    """
    # /dev/null and terminals may be named twice. A NUL is refused later, where the file is opened.
    if output.is_char_device() or "\0" in f"{output}{other}":
        return False
    # Links are resolved first: an output may reach an input through one.
    output, other = Path(os.path.realpath(output)), Path(os.path.realpath(other))
    if output == other or (output.exists() and other.exists() and output.samefile(other)):
        return True
    return read and other in output.parents and (output.is_file() or (other / "manifest.json").is_file())


def _check_folder(path: Path, mark: Writes) -> None:
    parent = path.absolute().parent
    # A writer of a folder makes missing parents, so the nearest one that exists is checked.
    while mark.folder and not os.path.lexists(parent):
        parent = parent.parent
    with os_errors(f"the {mark.what} cannot be written", path):
        os.scandir(parent).close()


@dataclass(frozen=True)
class CommandCall:
    """The words of a command line.

    Attributes:
        flags: parameter of the command -> its option, for example "--top-k", or its argument, for example "ARTIFACT".
        given: the parameters that the command line has.
    """

    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    given: frozenset[str] = frozenset()


CALL: ContextVar[CommandCall] = ContextVar("CALL", default=CommandCall())  # noqa: B039  (frozen)
"""The command that runs; of a command that is called as a function, it has no words."""


def check_effects(marks: Mapping[str, Sequence[Any]], values: Mapping[str, Any]) -> None:
    """Raise unless every option that is given has an effect.

    Args:
        marks: parameter -> what its annotation says. values: parameter -> its value.

    Raises:
        UserError: it names every option without effect.
    """
    call, found = CALL.get(), dict[tuple[str, str, str], list[str]]()
    for name in (name for name in marks if name in call.given):
        for mark in marks[name]:
            if isinstance(mark, Needs) and not mark.met(values):
                other = " ".join([call.flags[mark.name], *([] if mark.value is None else [str(mark.value)])])
                found.setdefault((f"needs {other}", f"need {other}", f"give {other}"), []).append(call.flags[name])
            elif isinstance(mark, Without) and mark.name in call.given:
                why = f"no effect with {call.flags[mark.name]}", f"leave {call.flags[mark.name]} out"
                found.setdefault((f"has {why[0]}", f"have {why[0]}", why[1]), []).append(call.flags[name])
    if found:
        what = [f"{' and '.join(flags)} {one if len(flags) == 1 else more}" for (one, more, _), flags in found.items()]
        hint = [f"{how}, or leave {' and '.join(flags)} out" for (_, _, how), flags in found.items()]
        raise UserError("; ".join(what), hint="; ".join(hint))


_OWNERS = ("CompileConfig", *(kind.__name__ for kind in PARTS.values()), "Sampling", "Jacobi", "Cache")
_OF_CACHE = {"remote": "cache", "write": "cache_write", "libraries": "cache_libraries"}
_WORDS = {part.name: word for word, _, part in option_words() if part.name != word} | _OF_CACHE
"""Fields of a configuration -> the command's parameters, where their names differ."""
_FIRST = {field.name: word for word, field, part in reversed([*option_words()]) if part is not field}
"""Options that are several ones of the command -> the first one of these."""


def in_words_of(call: CommandCall, error: UserError) -> UserError:
    """Return an error of a function of the package in the words of the command that called the function.

    An option is told by its owner (`CompileConfig.quant`), its value (`quant='w8a9'`), an underscore (`top_k`), or its
    place at the beginning of a clause (`the lag is 4`).
    """
    if error.problems:
        return CompileError.collect([in_words_of(call, problem) for problem in error.problems])
    flags = {name: flag for name, flag in call.flags.items() if flag.startswith("--")}
    flags |= {name: flags[other] for name, other in _WORDS.items() if other in flags}
    if not flags:
        return error
    owner, names = f"(?:{'|'.join(_OWNERS)})", "|".join(sorted(flags, key=len, reverse=True))
    rules = (
        rf"(?:(?<=; )|^)(?:the )?(?P<name>{names})(?=:? is |: | are )",
        rf"{owner}\.(?P<name>{names})(?:\.\w+)*",
        rf"(?<![\w.'\"`/-])(?P<name>{names})=(?P<value>'[^']*'|\"[^\"]*\"|[^\s,;:)]+)",
        rf"(?<![\w.'\"`/-])(?P<name>(?=[a-z]+_)(?:{names}))(?![\w('\"`=\[]|\.\w)",
        rf"(?<=\bleave )(?P<name>{names})(?= out)",
    )

    def translated(text: str) -> str:
        text = re.sub(rf"^{owner} is not valid: (?:\(whole\): )?", "", text)
        for rule in rules:
            text = re.sub(rule, spelt, text)
        return text

    def spelt(found: re.Match[str]) -> str:
        flag, value = flags[found["name"]], (found.groupdict().get("value") or "True").strip("'\"")
        return {"True": flag, "False": f"no {flag}"}.get(value, f"{flag} {value}")

    places = {name: flags[word] for name, word in _FIRST.items() if word in flags} | flags
    where = "" if error.where in _OWNERS else places.get(error.where, translated(error.where))
    return type(error)(translated(error.what), where=where, hint=translated(error.hint))
