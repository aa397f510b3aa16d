"""JSON from files: of bounded size and depth, no key twice, no NaN, UTF-8 only."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from fastcar_compile.errors import UserError
from fastcar_compile.support import limits

_ESCAPES = re.compile(rb"\\.", re.DOTALL)
_STRINGS = re.compile(rb'"[^"]*"')
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))


def parse_json(
    data: bytes, *, size: int = limits.JSON_BYTES, depth: int = limits.JSON_DEPTH, constants: bool = False
) -> Any:
    """Return the value of a JSON text.

    Args:
        constants: read NaN and Infinity too, which Python writes for floats that are not finite.

    Raises:
        ValueError: the text is too long, too deep, not UTF-8 or not JSON, or an object has a key twice.
    """
    if len(data) > size:
        raise ValueError(f"it has {len(data)} bytes, and at most {size} are read")
    if _is_deeper(data, depth):
        raise ValueError(f"its brackets are not balanced, or more than {depth} deep")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: byte {error.start}") from error
    constant = float if constants else _no_constant
    value = json.loads(text, object_pairs_hook=_object, parse_constant=constant, parse_float=_finite)
    if _SURROGATES.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it has half of a surrogate pair in it") from None
    return value


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
        with path.open("rb") as file:
            data = file.read(size + 1)
        return parse_json(data, size=size, constants=constants)
    except (OSError, ValueError) as caught:  # a path with a NUL raises ValueError too
        text = getattr(caught, "strerror", None) or caught
        raise error(f"the {what} cannot be read: {text}", where=str(path), hint=hint) from caught


def _is_deeper(data: bytes, depth: int) -> bool:
    """Return whether brackets nest deeper than `depth`. A recursive parser would itself fail before it could tell."""
    plain = _ESCAPES.sub(b"", data) if b"\\" in data else data
    rest = _STRINGS.sub(b"", plain.translate(_BRACKETS, _OTHERS)).replace(b'"', b"")
    for _ in range(depth):
        if not rest:
            return False
        rest = rest.replace(b"[]", b"")
    return bool(rest)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {min(name for name in counts if counts[name] > 1)!r} is given twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value
