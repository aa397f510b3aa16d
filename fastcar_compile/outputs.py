"""Files and folders that are written: whether that is possible is checked before the work, not after it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
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
