"""JSON from files: of bounded size and depth, no NaN, UTF-8 only."""

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from fastcar_compile.errors import UserError
from fastcar_compile.support import limits
from fastcar_compile.support.values import file_bytes


def parse_json(data: bytes, *, size: int = limits.JSON_BYTES, constants: bool = False) -> Any:
    """Return the value of a JSON text; of a key that is given twice, the last value.

    Args:
        constants: read NaN and Infinity too, which Python writes for floats that are not finite.

    Raises:
        ValueError: the text is too long, more than 200 brackets deep, not UTF-8 or not JSON.
    """
    if len(data) > size:
        raise ValueError(f"it has {len(data)} bytes, and at most {size} are read")
    return from_json(data, allow_inf_nan=constants)


def read_json(
    path: Path,
    what: str,
    error: type[UserError],
    *,
    size: int = limits.JSON_BYTES,
    constants: bool = False,
    hint: str = "",
) -> Any:
    """Return the content of a JSON file.

    Args:
        what: name of the file in an error, for example "thresholds". error: type of the error that is raised.
        size, constants: as for `parse_json`.

    Raises:
        UserError: of the given type: the file is missing, or it holds no JSON within the limits.
    """
    try:
        return parse_json(file_bytes(path, size), size=size, constants=constants)
    except (OSError, ValueError) as caught:  # a path with a NUL raises ValueError too
        text = getattr(caught, "strerror", None) or caught
        raise error(f"the {what} cannot be read: {text}", where=str(path), hint=hint) from caught
