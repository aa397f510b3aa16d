"""safetensors files: read as memory maps, written in pieces. Tensors are numpy arrays here."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fastcar_compile.config.formats import BY_SAFETENSORS, DType, dtype_of
from fastcar_compile.errors import ArtifactError, InternalError
from fastcar_compile.support import limits
from fastcar_compile.support.values import Array, parse_json

Piece = tuple[str, int, memoryview]
"""Bytes of a tensor: its name, their offset in it, the bytes, valid until the next piece is asked for."""


CHUNK = 2 << 20
"""Bytes of a huge page, of x86-64 and of AArch64 with 4 KiB pages."""

_HINT = "compile the model again, or copy the artifact again"

ALIGNMENT = 64
"""Bytes: a cache line, and what TVM wants of a tensor that it uses in place."""


@dataclass(frozen=True)
class TensorSpec:
    """Element type and shape of a tensor."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * prod(self.shape)

    @classmethod
    def of(cls, array: Array) -> TensorSpec:
        """Return the spec of an array."""
        return cls(dtype_of(array), array.shape)


@dataclass(frozen=True)
class TensorPlacement:
    """Where a tensor's bytes are: file name in the artifact, offset from the start of the file, length."""

    file: str
    offset: int
    length: int


def placed(file: str, specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, TensorPlacement]]:
    """Return the header of a safetensors file, and where each tensor is in the file.

    Tensors of whole cache lines come first. So they start on a cache line in the file, and a memory map of the file can
    be used in place.
    """
    places, at = dict[str, int](), 0
    header: dict[str, Any] = {}
    # Tensors of whole cache lines come first; one odd tensor would shift all behind it.
    for name in sorted(specs, key=lambda n: (specs[n].nbytes % ALIGNMENT != 0, -specs[n].dtype.itemsize)):
        spec, places[name] = specs[name], at
        at += spec.nbytes
        offsets = [places[name], at]
        header[name] = {"dtype": spec.dtype.safetensors, "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data begins behind 8 bytes of length and the header. Spaces move that place to a cache line.
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    start = 8 + len(text)
    found = {n: TensorPlacement(file, start + places[n], specs[n].nbytes) for n in specs}
    return len(text).to_bytes(8, "little") + text, found


def write_pieces(
    root: Path, file: str, specs: Mapping[str, TensorSpec], pieces: Iterable[Piece]
) -> dict[str, TensorPlacement]:
    """Write one safetensors file, holding one piece of a tensor at a time; return where each tensor is, as `placed`.

    Args:
        root: folder of the artifact. file: name in it. specs: of every tensor.
        pieces: each byte of every tensor once, in any order.

    Raises:
        InternalError: they are more or fewer bytes.
    """
    header, places = placed(file, specs)
    written = dict.fromkeys(specs, 0)
    with (root / file).open("wb", buffering=0) as stream:
        chunks = _Chunks(stream, len(header) + sum(spec.nbytes for spec in specs.values()))
        chunks.write(0, memoryview(header))
        for name, offset, data in pieces:
            if offset + len(data) > specs[name].nbytes:
                raise InternalError(f"{name} has {specs[name].nbytes} bytes; {offset + len(data)} were given")
            chunks.write(places[name].offset + offset, data)
            written[name] += len(data)
    if wrong := next((name for name in specs if written[name] != specs[name].nbytes), None):
        raise InternalError(f"{wrong} has {specs[wrong].nbytes} bytes; {written[wrong]} were given")
    return places


class _Chunks:
    """Writes a file in any order, but in whole chunks of the size of a huge page.

    A kernel whose page cache has large folios makes them as large as the write that fills them, and maps such a chunk
    with one entry of the page table.

    Args:
        stream: unbuffered. size: of the file, all of which will be written, each byte once.
    """

    def __init__(self, stream: io.FileIO, size: int) -> None:
        self._stream, self._size = stream, size
        self._open: dict[int, tuple[bytearray, int]] = {}
        self._spare: list[bytearray] = []  # used again: the system clears every page that it gives
        # The full size is set first, so chunks may be written in any order.
        stream.truncate(size)

    def write(self, at: int, data: memoryview) -> None:
        """Put bytes at an offset; a chunk goes to the file when it is full."""
        while data:
            inside = at % CHUNK
            whole = len(data) // CHUNK * CHUNK if inside == 0 else 0
            if whole:
                self._put(at, data[:whole])
            taken = whole or self._keep(at - inside, inside, data)
            at, data = at + taken, data[taken:]

    def _keep(self, start: int, inside: int, data: memoryview) -> int:
        """Copy what belongs to the chunk at `start`; return how many bytes that were."""
        length = min(CHUNK, self._size - start)
        spare = self._spare.pop() if self._spare and length == CHUNK and start not in self._open else None
        chunk, filled = self._open.pop(start, None) or (spare or bytearray(length), 0)
        taken = min(len(data), length - inside)
        chunk[inside : inside + taken] = data[:taken]
        if filled + taken < length:
            self._open[start] = chunk, filled + taken
        else:
            self._put(start, memoryview(chunk))
            if length == CHUNK:
                self._spare.append(chunk)
        return taken

    def _put(self, at: int, data: memoryview) -> None:
        self._stream.seek(at)
        while data:
            data = data[self._stream.write(data) :]


def octets(array: Array) -> memoryview:
    """Return the bytes of an array, or of a contiguous copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def save_tensors(path: str | Path, arrays: Mapping[str, Array]) -> dict[str, TensorPlacement]:
    """Write arrays to one safetensors file; same arrays, same bytes. Return where each array is."""
    file, specs = Path(path), {name: TensorSpec.of(arrays[name]) for name in sorted(arrays)}
    return write_pieces(file.parent, file.name, specs, ((name, 0, octets(arrays[name])) for name in specs))


class _Entry(BaseModel):
    """What the header of a safetensors file says of one tensor."""

    model_config = ConfigDict(frozen=True)

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = TypeAdapter(dict[str, _Entry])


def tensors_of(data: Array, where: str) -> dict[str, Array]:
    """Return all tensors of a safetensors file as views of its bytes.

    Args:
        data: uint8 [N]. where: the file, for error texts.

    Raises:
        ArtifactError: they are not a valid safetensors file.
    """
    try:
        end = 8 + int.from_bytes(data[:8].tobytes(), "little")
        # A corrupt length may be huge. One byte more than is allowed makes the parser refuse the text.
        header: Any = parse_json(data[8 : min(end, limits.JSON_BYTES + 9)].tobytes())
        header.pop("__metadata__", None)
        return {name: _view(data[end:], entry) for name, entry in _HEADER.validate_python(header).items()}
    except ValidationError as error:
        what = "the tensor file cannot be read: its header is malformed"
        raise ArtifactError(what, where=where, hint=_HINT) from error
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise ArtifactError(f"the tensor file cannot be read: {error}", where=where, hint=_HINT) from error


def _view(data: Array, entry: _Entry) -> Array:
    begin, end = entry.data_offsets
    spec = TensorSpec(BY_SAFETENSORS[entry.dtype], entry.shape)
    if not 0 <= begin <= end <= data.size or end - begin != spec.nbytes:
        raise ValueError(f"bytes {begin} to {end} do not hold {spec.dtype.name} {list(spec.shape)}")
    return np.asarray(data[begin:end]).view(spec.dtype.numpy).reshape(spec.shape)
