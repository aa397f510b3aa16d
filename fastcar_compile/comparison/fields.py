"""Nested values of JSON, leaf by leaf."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from fastcar_compile.comparison.report import FieldChange

_NUMBER = re.compile(r"(?<=[._])\d+(?=[._]|$)")
_INDEX = re.compile(r"\[\d+\]")


def field_changes(a: Any, b: Any) -> tuple[FieldChange, ...]:
    """Return the leaves that differ, in order; equal changes along a list are one."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    changes = [
        FieldChange(path=path, a=left.get(path), b=right.get(path))
        for path in sorted(left.keys() | right.keys(), key=_natural)
        if _differ(left.get(path), right.get(path))
    ]
    folded: dict[tuple[str, str, str], list[FieldChange]] = {}
    for change in changes:
        folded.setdefault((_INDEX.sub("[*]", change.path), repr(change.a), repr(change.b)), []).append(change)
    return tuple(
        found[0] if len(found) == 1 else found[0].model_copy(update={"path": path, "count": len(found)})
        for (path, _, _), found in folded.items()
    )


def without_numbers(path: str) -> str:
    """Return a dotted path with "*" for the numbers of layers."""
    return _NUMBER.sub("*", path)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in cast("Mapping[str, Any]", value).items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _differ(a: Any, b: Any) -> bool:
    return type(a) is not type(b) or a != b


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]
