"""Tensors of two artifacts, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.comparison.fields import without_numbers
from fastcar_compile.comparison.report import TensorChange

Array = NDArray[Any]
CHUNK = 1 << 22
"""Elements that are compared at once, so that tensors of gigabytes are not copied whole."""


def weight_changes(a: Mapping[str, Array], b: Mapping[str, Array]) -> tuple[TensorChange, ...]:
    """Return the tensors that differ, in the order of their names; those without values to compare are folded."""
    groups: dict[tuple[str, ...], list[TensorChange]] = {}
    for change in _changes(a, b):
        name = change.name if change.kind == "values" else without_numbers(change.name)
        groups.setdefault((name, change.kind, change.detail), []).append(change)
    return tuple(
        found[0] if len(found) == 1 else found[0].model_copy(update={"name": name, "count": len(found)})
        for (name, *_), found in groups.items()
    )


def _changes(a: Mapping[str, Array], b: Mapping[str, Array]) -> Iterator[TensorChange]:
    for name in sorted(a.keys() | b.keys()):
        if name not in b:
            yield TensorChange(name=name, kind="only in a", detail=_text(a[name]))
        elif name not in a:
            yield TensorChange(name=name, kind="only in b", detail=_text(b[name]))
        elif _text(a[name]) != _text(b[name]):
            yield TensorChange(name=name, kind="shape", detail=f"{_text(a[name])} -> {_text(b[name])}")
        elif (change := _values(name, a[name], b[name])) is not None:
            yield change


def _values(name: str, a: Array, b: Array) -> TensorChange | None:
    elements, largest, squares, base = 0, 0.0, 0.0, 0.0
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat_a.size, CHUNK):
        one, other = flat_a[start : start + CHUNK], flat_b[start : start + CHUNK]
        differs = np.frombuffer(one.tobytes(), np.uint8) != np.frombuffer(other.tobytes(), np.uint8)
        elements += int(differs.reshape(one.size, -1).any(1).sum())
        x, y = one.astype(np.float64), other.astype(np.float64)
        difference = np.nan_to_num(y - x, nan=np.inf, posinf=np.inf, neginf=-np.inf)
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
        squares, base = squares + float((difference**2).sum()), base + float((x**2).sum())
    if not elements:
        return None
    relative = float(np.sqrt(squares / base)) if base > 0 else float("inf")
    return TensorChange(name=name, kind="values", elements=elements, max_abs=largest, relative=relative)


def _text(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"
