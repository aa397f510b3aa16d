"""The files and folders of a command: what its options write and read, checked before the work.

An option that writes says so in its annotation: `Annotated[Path, typer.Option(...), Writes("trace")]`. Every other
path is read.
"""

from __future__ import annotations

import inspect
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

from typer.models import ArgumentInfo, ParameterInfo

from fastcar_compile.outputs import Place, check_apart, check_writable


@dataclass(frozen=True)
class Writes:
    """Marks an option whose path is written.

    Args:
        what: the file in an error, for example "trace".
        folder: it is a folder that files are put into.
        replaced: it is a folder that is replaced as a whole. Its writer checks that it can be written.
    """

    what: str = "output"
    folder: bool = False
    replaced: bool = False


class MayRead:
    """Marks an option of text that may name a file, alone or before a colon."""


@dataclass(frozen=True)
class PathOption:
    """One parameter of a command that has paths.

    Args:
        name: as a user writes it. writes: None: it is read. text: it may also be something else than a path.
    """

    name: str
    writes: Writes | None
    text: bool


def path_options(function: Callable[..., Any]) -> dict[str, PathOption]:
    """Return the parameters of a command that have paths, by their names in Python."""
    found = dict[str, PathOption]()
    for name, hint in get_type_hints(function, include_extras=True).items():
        extras: tuple[Any, ...] = getattr(hint, "__metadata__", ())
        text = any(isinstance(extra, MayRead) for extra in extras)
        if text or "Path" in inspect.formatannotation(getattr(hint, "__origin__", hint)):
            writes = next((extra for extra in extras if isinstance(extra, Writes)), None)
            found[name] = PathOption(_as_written(name, extras), writes, text)
    return found


def _as_written(name: str, extras: tuple[Any, ...]) -> str:
    info = next((extra for extra in extras if isinstance(extra, ParameterInfo)), None)
    if isinstance(info, ArgumentInfo):
        return name.upper()
    # In an annotation typer takes the first name as the default.
    names = () if info is None else (info.default, *(info.param_decls or ()))
    long = (text for text in map(str, names) if text.startswith("--"))
    return next(long, "--" + name.replace("_", "-"))


def check_places(options: Mapping[str, PathOption], given: Mapping[str, object]) -> None:
    """Raise unless every output of a command can be written, and none is also another output or an input.

    Raises:
        UserError: with the option, the path and what to do.
    """
    writes, reads = list[Place](), list[Place]()
    for name, option in options.items():
        kind = option.writes
        for path in _paths(given.get(name), option.text):
            place = Place(option.name, path, replaced=kind is not None and kind.replaced)
            (reads if kind is None else writes).append(place)
    check_apart([*writes, *_standard_output()], reads)
    for name, option in options.items():
        kind = option.writes
        if kind is not None and not kind.replaced:
            check_writable(cast("Path | None", given.get(name)), kind.what, folder=kind.folder)


def _paths(value: object, text: bool) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, list):
        yield from (item for item in cast("list[object]", value) if isinstance(item, Path))
    elif text and isinstance(value, str):
        yield from (Path(part) for part in (value, value.rpartition(":")[0]) if part and "\0" not in part)


def _standard_output() -> Iterator[Place]:
    """Yield the file that the shell sends the standard output to, if it is one."""
    try:
        mode = os.fstat(1).st_mode
    except OSError:
        return
    if stat.S_ISREG(mode):
        yield Place("the standard output", Path("/dev/fd/1"))
