"""Fields and tensors that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastcar_compile.comparison.fields import field_changes
from fastcar_compile.comparison.weights import weight_changes


def test_leaves_that_differ_with_their_path() -> None:
    a = {"quant": "w8a8", "replay": {"threshold": [1, 2]}, "same": None, "kind": 1}
    b = {"quant": "w4a8", "replay": {"threshold": [1, 3]}, "same": None, "kind": True, "new": 4}
    found = [(c.path, c.a, c.b) for c in field_changes(a, b)]
    assert found == [
        ("kind", 1, True),
        ("new", None, 4),
        ("quant", "w8a8", "w4a8"),
        ("replay.threshold[1]", 2, 3),
    ]
    assert field_changes(a, a) == ()


def test_equal_changes_along_a_list_are_one() -> None:
    a, b = ({"layers": [{"rows": rows} for _ in range(12)]} for rows in (1, 2))
    (change,) = field_changes(a, b)
    assert (change.path, change.a, change.b, change.count) == ("layers[*].rows", 1, 2, 12)


def test_tensors_by_name_type_and_value() -> None:
    a: dict[str, NDArray[Any]] = {
        "layers.0.w": np.zeros((2, 2), np.float32),
        "layers.1.w": np.zeros((2, 2), np.float32),
    }
    a |= {"same": np.ones(3, np.int8), "moved": np.array([3.0, 4.0], np.float32)}
    b = {name: value.astype(np.float16) if name.startswith("layers") else value for name, value in a.items()}
    b["moved"] = np.array([3.0, 4.5], np.float32)
    b["new"] = np.zeros((), np.int8)
    moved, folded, new = sorted(weight_changes(a, b), key=lambda c: c.kind != "values")
    assert (moved.name, moved.elements, moved.max_abs, moved.relative) == ("moved", 1, 0.5, pytest.approx(0.1))
    assert (folded.name, folded.count, folded.kind) == ("layers.*.w", 2, "shape")
    assert folded.detail == "float32[2, 2] -> float16[2, 2]"
    assert (new.name, new.kind, new.detail) == ("new", "only in b", "int8[]")


def test_nan_and_signed_zero_are_compared_by_their_bits() -> None:
    nan, zero = np.array([np.nan], np.float32), np.array([0.0], np.float32)
    assert weight_changes({"w": nan}, {"w": nan}) == ()
    (signed,) = weight_changes({"w": zero}, {"w": -zero})
    assert (signed.elements, signed.max_abs) == (1, 0.0)
    (lost,) = weight_changes({"w": zero}, {"w": nan})
    assert lost.max_abs == np.inf
