"""safetensors files written one tensor at a time, and weights spread over several of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fastcar_compile.errors import InternalError

SHARD_BYTES = 1 << 30
"""Weights above this go to several files of about this size."""

CHUNK = 2 << 20
"""Bytes of a huge page, of x86-64 and of AArch64 with 4 KiB pages."""

ALIGNMENT = 64
"""Bytes: a cache line, and what TVM wants of a tensor that it uses in place."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorSource(Protocol):
    """Tensors by name, whose shapes and dtypes are known before they are made."""

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str, /) -> Tensor: ...

    def spec(self, name: str) -> Tensor:
        """Shape and dtype of a tensor; its values may be missing."""
        ...


@dataclass(frozen=True)
class Placement:
    """Where a tensor's bytes are: file name in the artifact, offset from the start of the file, length."""

    file: str
    offset: int
    length: int


def plan_shards(source: TensorSource, stem: str, *, one_file: bool = False) -> dict[str, list[str]]:
    """File name -> tensor names, in the source's order: `stem.safetensors`, or `stem-00001.safetensors` and so on."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in source:
        size = _size(source.spec(name))
        if shards[-1] and filled + size > SHARD_BYTES and not one_file:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}.safetensors": names for i, names in enumerate(shards, 1)}


def weight_files(files: Iterable[str], stem: str) -> list[str]:
    """Those of an artifact's files that `plan_shards` named, in order."""
    wanted = PurePosixPath(stem)
    return sorted(f for f in files if PurePosixPath(f).match(f"{wanted}.safetensors") or _is_shard(f, wanted))


def _is_shard(file: str, stem: PurePosixPath) -> bool:
    return PurePosixPath(file).match(f"{stem}-[0-9][0-9][0-9][0-9][0-9].safetensors")


def write_streamed(root: Path, file: str, names: Iterable[str], source: TensorSource) -> dict[str, Placement]:
    """Write one safetensors file, holding one tensor at a time.

    Tensors of whole cache lines come first, so that those start on one in the file; a memory map of it can be used in
    place.

    Args:
        root: folder of the artifact. file: name in it. names: what to write. source: asked for each tensor once, in the
            order of `names`.

    Returns:
        Where each tensor is.
    """
    names = list(names)
    layout = sorted(names, key=lambda n: _rank(source.spec(n)))
    header, places, at = {}, {}, 0
    for name in layout:
        spec = source.spec(name)
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + _size(spec)]}
        places[name] = at
        at += _size(spec)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    start = 8 + len(text)
    with (root / file).open("wb", buffering=0) as stream:
        chunks = _Chunks(stream, start + at)
        chunks.write(0, memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            chunks.write(start + places[name], _bytes(name, source[name], source.spec(name)))
    return {n: Placement(file, start + places[n], _size(source.spec(n))) for n in names}


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
        stream.truncate(size)

    def write(self, at: int, data: memoryview) -> None:
        """Puts bytes at an offset; a chunk goes to the file when it is full."""
        while data:
            inside = at % CHUNK
            whole = len(data) // CHUNK * CHUNK if inside == 0 else 0
            if whole:
                self._put(at, data[:whole])
            taken = whole or self._keep(at - inside, inside, data)
            at, data = at + taken, data[taken:]

    def _keep(self, start: int, inside: int, data: memoryview) -> int:
        """Copies what belongs to the chunk at `start`; how many bytes that were."""
        length = min(CHUNK, self._size - start)
        chunk, filled = self._open.pop(start, None) or (bytearray(length), 0)
        taken = min(len(data), length - inside)
        chunk[inside : inside + taken] = data[:taken]
        if filled + taken < length:
            self._open[start] = chunk, filled + taken
        else:
            self._put(start, memoryview(chunk))
        return taken

    def _put(self, at: int, data: memoryview) -> None:
        self._stream.seek(at)
        while data:
            data = data[self._stream.write(data) :]


def _rank(spec: Tensor) -> tuple[bool, int]:
    return _size(spec) % ALIGNMENT != 0, -spec.dtype.itemsize


def _size(spec: Tensor) -> int:
    return spec.numel() * spec.dtype.itemsize


def _bytes(name: str, value: Tensor, spec: Tensor) -> memoryview:
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise InternalError(f"{name} is {value.dtype} {list(value.shape)}, not {spec.dtype} {list(spec.shape)}")
    flat = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8))


@dataclass(frozen=True)
class WrittenTensors:
    """Tensors that were written to files, as a source of weights: nothing is made a second time.

    Attributes:
        root: folder of the files. places: where each tensor is. specs: shape and dtype of each.
    """

    root: Path
    places: Mapping[str, Placement]
    specs: TensorSource

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor as it was written, or its rows [begin, end) along the first axis."""
        place, spec = self.places[name], self.specs.spec(name)
        data = torch.from_numpy(np.fromfile(self.root / place.file, np.uint8, place.length, offset=place.offset))
        whole = data.view(spec.dtype).reshape(spec.shape)
        return whole if rows is None else whole[slice(*rows)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.specs.spec(name).shape)


class LazyTensors(Mapping[str, Tensor]):
    """Byte streams that are made when they are asked for.

    Args:
        streams: name -> (bytes, what makes the uint8 tensor of that length), in order.
    """

    def __init__(self, streams: Mapping[str, tuple[int, Callable[[], Tensor]]]) -> None:
        self._streams = dict(streams)

    def __getitem__(self, name: str) -> Tensor:
        return self._streams[name][1]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def spec(self, name: str) -> Tensor:
        """Shape and dtype."""
        return torch.empty(self._streams[name][0], dtype=torch.uint8, device="meta")
