"""Files and folders that are written: whether that is possible is checked before the work, not after it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from fastcar_compile.errors import UserError

HINT = "choose another place, or correct its permissions"


@contextmanager
def os_errors(what: str, path: str | Path, hint: str = HINT) -> Generator[None]:
    """Raise a UserError that names the path where the operating system refuses what the block does.

    Args:
        what: the subject of the error, for example "the trace cannot be written".

    Raises:
        UserError: an OSError, or a path that no file can have.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}", where=str(path), hint=hint) from error
    except ValueError as error:
        if "null" not in str(error):
            raise
        raise UserError(f"{what}: the name has a NUL in it", where=repr(str(path)), hint=hint) from error


def check_writable(path: str | Path | None, what: str = "output", *, folder: bool = False) -> None:
    """Raise unless a file, or with `folder` a folder, can be written at `path`; nothing is left behind.

    A folder may stand in others that are missing, as its writer makes them. A file's folder must exist.

    Args:
        path: None: nothing is to be written.
        what: the file in an error, for example "trace".

    Raises:
        UserError: the place is of another kind, or cannot be written.
    """
    if path is None:
        return
    place = Path(path)
    with os_errors(f"the {what} cannot be written", place):
        if not os.path.lexists(place):
            _try_new(_first_missing(place) if folder else place, folder)
        elif folder and place.is_dir():
            with tempfile.TemporaryFile(dir=place):
                pass
        else:
            _check_file(place, what, folder)


def _first_missing(place: Path) -> Path:
    """Return the uppermost folder on the way to `place` that does not exist."""
    place = place.absolute()
    while place.parent != place and not os.path.lexists(place.parent):
        place = place.parent
    return place


def _try_new(place: Path, folder: bool) -> None:
    if folder:
        place.mkdir()
        place.rmdir()
        return
    os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    place.unlink()


def _check_file(place: Path, what: str, folder: bool) -> None:
    mode = place.stat().st_mode
    if folder or not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):  # a FIFO would wait for a reader
        kind = "a folder" if stat.S_ISDIR(mode) else "no folder" if folder else "no plain file"
        raise UserError(f"the {what} cannot be written: it is {kind}", where=str(place), hint="choose another name")
    with place.open("ab"):
        pass


@dataclass(frozen=True)
class Place:
    """A path of a call.

    Args:
        name: as the caller knows it, for example "--output". replaced: a folder that is replaced as a whole.
    """

    name: str
    path: Path
    replaced: bool = False


def check_apart(writes: Sequence[Place], reads: Sequence[Place]) -> None:
    """Raise where one output is also another output or an input, through links too, or stands in a folder that is read.

    An output may stand in the folder of a model, unless the folder would then be another model.

    Raises:
        UserError: with both names.
    """
    for first, second in combinations(writes, 2):
        if _same(first.path, second.path):
            raise _collision(f"{first.name} and {second.name} are the same", second)
        for inner, outer in ((first, second), (second, first)):
            if outer.replaced and _within(inner.path, outer.path):
                raise _collision(f"{inner.name} stands in the folder that {outer.name} replaces", inner)
    for output, source in product(writes, reads):
        _check_source(output, source)


def _check_source(output: Place, source: Place) -> None:
    if _same(output.path, source.path):
        raise _collision(f"{output.name} would overwrite {source.name}", output)
    if output.replaced and _within(source.path, output.path):
        raise _collision(f"{source.name} stands in the folder that {output.name} replaces", source)
    folder = _folder_of_files(source.path)
    if folder is None:
        return
    if _linked_into(output.path, folder):
        raise _collision(f"{output.name} is a hard link to a file in {source.name}", output)
    if not _within(output.path, folder):
        return
    if os.path.isfile(folder / "manifest.json"):
        raise _collision(f"{output.name} stands in the artifact {source.name}, which has no other files", output)
    beside = _same(Path(os.path.realpath(output.path)).parent, folder)
    if beside and not output.replaced and output.path.suffix in (".json", ".safetensors"):
        raise _collision(f"{output.name} would be read as a part of {source.name}", output)


def _collision(what: str, place: Place) -> UserError:
    return UserError(what, where=str(place.path), hint="give a place of its own")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode; None: nothing is there, or it is no file that two writers would spoil."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return None if stat.S_ISCHR(found.st_mode) else (found.st_dev, found.st_ino)


def _same(first: Path, second: Path) -> bool:
    one, other = _identity(first), _identity(second)
    if one is not None or other is not None:
        return one == other
    return not os.path.exists(first) and _real(first) == _real(second)


def _within(inner: Path, outer: Path) -> bool:
    """Whether a folder on the way to `inner` is `outer`, also where it is mounted twice."""
    return any(_same(folder, outer) for folder in _real(inner).parents)


def _real(path: Path) -> Path:
    return path if "\0" in str(path) else Path(os.path.realpath(path))


def _folder_of_files(path: Path) -> Path | None:
    """Return an artifact's or a model's folder; None: it is something else."""
    named = ("manifest.json", "config.json")
    return path if any(os.path.isfile(path / name) for name in named) else None


def _linked_into(path: Path, folder: Path) -> bool:
    """Whether an existing file with several names has one of them below the folder."""
    own = _identity(path)
    if own is None or path.is_dir() or path.stat().st_nlink == 1:
        return False
    return any(_identity(Path(parent) / name) == own for parent, _, names in os.walk(folder) for name in names)
