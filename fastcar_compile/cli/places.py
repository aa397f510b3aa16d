"""The files and folders of a command: none that it writes is one that it reads, and each can be made.

An option that writes says so in its annotation: `Annotated[Path, typer.Option(...), Writes("trace")]`. Every other
path is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

from fastcar_compile.errors import UserError, os_errors


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


def check_places(function: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Raise unless every output of a command has a folder, and none would overwrite an input or another output.

    Raises:
        UserError: with the option, the path and what to do.
    """
    hints = get_type_hints(function, include_extras=True)
    marks: dict[str, tuple[Any, ...]] = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
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
        yield from (Path(part) for part in (value, value.rpartition(":")[0]) if part)


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
