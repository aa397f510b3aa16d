"""Weights and constants of a `.pt2` file: tensors, and nothing that would have to be unpickled freely."""

from __future__ import annotations

import io
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._export.serde import schema
from torch._export.serde.serialize import _dict_to_dataclass, deserialize_scalar_type

from fastcar_compile import limits
from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.pt2_checks import check_name
from fastcar_compile.strict_json import parse_json

_WEIGHTS, _CONSTANTS = "data/weights/", "data/constants/"
_TENSOR_FILES = {_WEIGHTS: "weight_", _CONSTANTS: "tensor_"}
_HINT = "export a module whose parameters, buffers and constants are plain tensors on the CPU"


class Payloads:
    """The tensors of one program in an archive.

    Args:
        name: of the program. sizes: bytes of every part of the archive. reader: torch's of the archive.
    """

    def __init__(self, name: str, sizes: Mapping[str, int], reader: torch._C.PyTorchFileReader) -> None:
        self._name, self._sizes, self._reader = name, sizes, reader

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return self._tensors(_WEIGHTS, f"{_WEIGHTS}{self._name}_weights_config.json", "the weights")

    def constants(self) -> dict[str, Tensor]:
        """Return constants by name."""
        return self._tensors(_CONSTANTS, f"{_CONSTANTS}{self._name}_constants_config.json", "the constants")

    def _tensors(self, folder: str, config: str, what: str) -> dict[str, Tensor]:
        legacy = f"{folder}{self._name}.pt"
        if legacy in self._sizes:
            return only_tensors(self._reader.get_record(legacy), what)
        typed: Any = _dict_to_dataclass(schema.PayloadConfig, parse_json(self._reader.get_record(config)))
        stored: dict[str, Tensor] = {}
        return {name: self._tensor(folder, name, meta, stored) for name, meta in typed.config.items()}

    def _tensor(self, folder: str, name: str, meta: schema.PayloadMeta, stored: dict[str, Tensor]) -> Tensor:
        check_name(name)
        place = meta.path_name
        if not place.startswith(_TENSOR_FILES[folder]) or f"{folder}{place}" not in self._sizes:
            raise CompileError(f"{name} of the exported program is no tensor of the file", hint=_HINT)
        if meta.use_pickle:
            found = unpickled(self._reader.get_record(f"{folder}{place}"), name)
            return _plain(found, name)
        if meta.tensor_meta is None:
            raise CompileError(f"{name} of the exported program has no type", hint=_HINT)
        # Tensors of one part share its memory, as tied parameters do.
        flat = stored.get(place)
        if flat is None:
            flat = stored[place] = self._flat(f"{folder}{place}", meta.tensor_meta)
        value = _strided(flat, meta.tensor_meta, name)
        return torch.nn.Parameter(value, requires_grad=False) if meta.is_param else value

    def _flat(self, record: str, meta: schema.TensorMeta) -> Tensor:
        """Return the elements of a part as they are stored."""
        dtype = deserialize_scalar_type(meta.dtype)
        size, element = self._sizes[record], dtype.itemsize
        if size % element:
            raise CompileError(f"{record} has {size} bytes, no multiple of the {element} of {dtype}", hint=_HINT)
        flat = torch.empty(0, dtype=dtype)
        if size:
            raw = self._reader.get_storage_from_record(record, size // element, dtype)
            flat.set_(raw.untyped_storage(), 0, (size // element,), (1,))
        return flat


def only_tensors(data: bytes, what: str) -> dict[str, Tensor]:
    """Return a pickled dict of tensors.

    Raises:
        CompileError: it holds anything else.
    """
    found = unpickled(data, what)
    if not isinstance(found, dict):
        raise CompileError(f"{what} of the exported program are no dict of tensors", hint=_HINT)
    for name, value in found.items():
        check_name(name)
        _plain(value, name)
    return dict(found)


def unpickled(data: bytes, what: str) -> Any:
    """Return what torch's restricted unpickler makes of `data`.

    Raises:
        CompileError: it holds anything but tensors and plain containers.
    """
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # pickle, zip and torch raise many kinds; all of them mean that it is not only tensors
        what = f"{what} of the exported program holds Python objects, which are not unpickled"
        raise CompileError(what, hint=_HINT) from error


def _plain(value: Any, name: str) -> Tensor:
    kinds = (Tensor, torch.nn.Parameter)
    if type(value) not in kinds or value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise CompileError(f"{name} of the exported program is no plain tensor", hint=_HINT)
    return value


def _strided(flat: Tensor, meta: schema.TensorMeta, name: str) -> Tensor:
    sizes, strides = [_whole(s, name) for s in meta.sizes], [_whole(s, name) for s in meta.strides]
    # Strides of 0 repeat elements: a few stored bytes could claim any size.
    repeated = (prod(sizes) - flat.numel()) * flat.element_size()
    if repeated > limits.EXPANDED_BYTES or (meta.device is not None and meta.device.type != "cpu"):
        raise CompileError(f"{name} of the exported program is no plain tensor", hint=_HINT)
    return torch.as_strided(flat, sizes, strides, _whole(meta.storage_offset, name))


def _whole(size: schema.SymInt, name: str) -> int:
    if size.type != "as_int" or type(size.value) is not int or size.value < 0:
        raise CompileError(f"{name} of the exported program has no fixed shape", hint=_HINT)
    return size.value
