"""What is read is bounded."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcar_compile.errors import ArtifactError
from fastcar_compile.support.values import parse_json, read_json

REFUSED = {
    "deep": (b"[" * 10**6, "recursion limit"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "recursion limit"),
    "NaN": (b'{"a": NaN}', "expected value"),
    "many digits": (b"[" + b"9" * 5000 + b"]", "out of range"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "expected value"),
    "half a pair": (b'{"\\udc00": 1}', "surrogate"),
    "too long": (b" " * 101, "at most 100 are read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_json_is_refused(name: str) -> None:
    data, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        parse_json(data, size=100 if name == "too long" else 10**8)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_all_other_json_is_read(value: Any) -> None:
    import json

    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("name", ["missing", "folder", "nul\0"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtifactError, match="the report cannot be read") as caught:
        read_json(tmp_path / name, "report", ArtifactError)
    assert name in caught.value.where
