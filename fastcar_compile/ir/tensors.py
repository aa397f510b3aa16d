"""Between torch tensors and the numpy arrays that artifacts are written from and read as."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastcar_compile.artifact.tensor_files import Piece, Placement, TensorSpec, octets
from fastcar_compile.formats.dtypes import DTYPES
from fastcar_compile.ir.weights import Parameters


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch type in `formats.dtypes`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of this name."""
    return getattr(torch, name)


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return element type and shape; the values may be missing."""
    return TensorSpec(DTYPES[dtype_name(tensor.dtype)], tuple(tensor.shape))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return an array over the tensor's memory, or over a contiguous copy. numpy has no bfloat16 of its own."""
    spec, flat = spec_of(tensor), tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return np.empty(spec.shape, spec.dtype.numpy)
    # By way of bytes: numpy knows bfloat16 only as a type of ml_dtypes, to which torch does not convert.
    return flat.view(torch.uint8).numpy().view(spec.dtype.numpy).reshape(spec.shape)


def to_torch(array: NDArray[Any]) -> Tensor:
    """Return a tensor over the array's memory."""
    if not array.size:
        return torch.empty(array.shape, dtype=torch_dtype(array.dtype.name))
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat = torch.from_numpy(octets)  # pyright: ignore[reportUnknownMemberType]  (torch does not type its argument)
    return flat.view(torch_dtype(array.dtype.name)).reshape(array.shape)


@dataclass(frozen=True)
class ParameterSource:
    """Parameters as a source of tensors: a block is made when it is asked for."""

    params: Parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def spec(self, name: str) -> TensorSpec:
        """Return element type and shape."""
        return spec_of(self.params.spec(name))

    def pieces(self, names: Iterable[str]) -> Iterator[Piece]:
        """Yield the values in blocks of rows."""
        for name, row, part in self.params.blocks(names):
            yield name, row * self.params.spec(name)[:1].nbytes if row else 0, octets(to_numpy(part))


@dataclass(frozen=True)
class WrittenTensors:
    """Tensors that were written to files, as a source of weights: nothing is made a second time.

    Attributes:
        root: folder of the files. places: where each tensor is. specs: its element type and shape.
    """

    root: Path
    places: Mapping[str, Placement]
    specs: Mapping[str, TensorSpec]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return the tensor as it was written, or its rows [begin, end): a private map of the file.

        A page is read when it is first touched. Writing to the tensor changes the tensor only.
        """
        place, spec = self.places[name], self.specs[name]
        if not place.length:
            return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype.name))
        # Mode "c" is copy on write: the file stays as it is.
        data = np.memmap(self.root / place.file, np.uint8, "c", offset=place.offset, shape=place.length)
        whole = to_torch(np.asarray(data).view(spec.dtype.numpy).reshape(spec.shape))
        return whole if rows is None else whole[slice(*rows)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return its shape."""
        return self.specs[name].shape
