"""What a reader may do with an input: succeed, or refuse it by name."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fastcar_compile.errors import UserError

T = TypeVar("T")

_FOLDER = tempfile.TemporaryDirectory(prefix="fastcar-fuzz-")

MOST_TEXT = 20_000
"""Characters of an error: a reader does not repeat the file."""


class Finding(AssertionError):
    """A reader did what none may do."""


def folder() -> Path:
    """A folder of this process, for readers of files."""
    return Path(_FOLDER.name)


def as_file(name: str, data: bytes) -> Path:
    """A file of these bytes, in place of the one of this name."""
    path = folder() / name
    path.write_bytes(data)
    return path


def accepted(error: type[UserError], read: Callable[[], T]) -> T | None:
    """What `read` returns; None where it refuses the input as it may: with this error, in a text that can be shown.

    Raises:
        Finding: the error is another one of ours, or cannot be shown. An exception that is none of ours is not caught.
    """
    try:
        return read()
    except UserError as caught:
        if not isinstance(caught, error):
            raise Finding(f"{type(caught).__name__} instead of {error.__name__}") from caught
        _check_text(caught)
        return None


def same(found: object, expected: object, what: str) -> None:
    """Raise Finding unless both are equal."""
    if found != expected:
        raise Finding(f"{what}: {found!r:.200} is not {expected!r:.200}")


def _check_text(error: UserError) -> None:
    try:
        str(error).encode()
        json.dumps(error.to_json(), allow_nan=False)
    except (UnicodeEncodeError, ValueError, TypeError) as caught:
        raise Finding(f"the error cannot be written: {caught}") from error
    if len(str(error)) > MOST_TEXT:
        raise Finding(f"the error has {len(str(error))} characters")
