"""Weights on disk: any sizes in any order, written in whole chunks."""

import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensor_maps import load_tensors

from fastcar_compile.errors import InternalError
from fastcar_compile.ir import tensor_files
from fastcar_compile.ir.tensor_files import CHUNK, TensorPlacement, TensorSpec, _Chunks, save_tensors, write_pieces
from fastcar_compile.ir.weights import dtype_name, to_torch

DTYPES = (np.float32, np.float16, np.int8, np.uint8, np.int64, ml_dtypes.bfloat16)


class _Recorded(io.FileIO):
    """A file that remembers where it was written, and takes at most `most` bytes at a time, as files may."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        super().__init__(path, "wb")
        self.writes: list[tuple[int, int]] = []
        self._most = most

    def write(self, data: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.writes.append((self.tell(), len(data)))
        return super().write(data[: self._most])


@given(
    tensors=st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 700)), min_size=1, max_size=8),
    chunk=st.sampled_from([64, 256, 1000, CHUNK]),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_tensor_is_where_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: list[tuple[type, int]], chunk: int
) -> None:
    monkeypatch.setattr(tensor_files, "CHUNK", chunk)
    made = {f"t{i}": (np.arange(n) * (i + 1)).astype(dtype) for i, (dtype, n) in enumerate(tensors)}
    places = save_tensors(tmp_path / "w.safetensors", made)
    read = safetensors.torch.load_file(tmp_path / "w.safetensors")
    mapped = load_tensors(tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    for name, value in made.items():
        assert torch.equal(read[name], to_torch(value))
        np.testing.assert_array_equal(mapped[name], value)
        assert (dtype_name(read[name].dtype), mapped[name].dtype) == (value.dtype.name, value.dtype)
        raw = value.tobytes()
        place = places[name]
        assert place == TensorPlacement("w.safetensors", place.offset, len(raw))
        assert data[place.offset : place.offset + place.length] == raw


def test_writes_are_whole_chunks(tmp_path: Path) -> None:
    """Two regions that are filled in turns, as weights and their scales are, with pieces of no round size."""
    size = 5 * CHUNK + 12345
    whole = bytes(range(251)) * (size // 251 + 1)
    with _Recorded(tmp_path / "file") as stream:
        chunks = _Chunks(stream, size)
        middle, step = 3 * CHUNK + 777, 999_983
        for at in range(0, middle, step):
            for begin, end in ((at, min(at + step, middle)), (middle + at, min(middle + at + step, size))):
                chunks.write(begin, memoryview(whole[begin:end]))
    assert (tmp_path / "file").read_bytes() == whole[:size]
    assert all(at % CHUNK == 0 and (n % CHUNK == 0 or at + n == size) for at, n in stream.writes)
    assert len(stream.writes) == 6


@pytest.mark.parametrize(("at", "length", "given"), [(0, 3, 3), (2, 3, 5)])
def test_every_byte_must_be_given(tmp_path: Path, at: int, length: int, given: int) -> None:
    specs = {"a": TensorSpec.of(np.zeros(4, np.uint8)), "b": TensorSpec.of(np.zeros(0, np.uint8))}
    with pytest.raises(InternalError, match=f"a has 4 bytes; {given} were given"):
        write_pieces(tmp_path, "w.safetensors", specs, [("a", at, memoryview(bytes(length)))])


def test_a_file_may_take_less_than_it_is_given(tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    with _Recorded(tmp_path / "file", most=70_001) as stream:
        _Chunks(stream, len(data)).write(0, memoryview(data))
    assert (tmp_path / "file").read_bytes() == data
