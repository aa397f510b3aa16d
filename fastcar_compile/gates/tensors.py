"""Checks and conversions of the tensors of a trained gate. This file loads torch; `weights.py` does not."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastcar_compile.errors import CompileError, InputError, UserError, attempt
from fastcar_compile.gates.scores import WEIGHT_BITS
from fastcar_compile.gates.weights import FORMAT, HINT, PARAMETERS, VERSION, LayerTensors, LayerWeights
from fastcar_compile.support.files import replace_file
from fastcar_compile.support.values import path_of, refuse_pipe

LARGEST_EXPONENT, LEAST_EXPONENT = 64, -70
"""The magnitudes of a unit's weights sum to at most 2^64; a sum below 2^-70 is rounded as if it were 2^-70."""


def layer_weights(params: Mapping[str, Tensor]) -> LayerWeights:
    """Return one layer's network, w1 rounded to bfloat16 and so that its sums are exact (`exact_weights`)."""
    rest = {name: params[name].detach().float().contiguous() for name in PARAMETERS[1:]}
    return LayerWeights(w1=exact_weights(params["w1"].detach()).contiguous(), **rest)


def exact_weights(w1: Tensor) -> Tensor:
    """Return w1 [units, 2 H] as bfloat16 whose sums of products with features are exact in float64.

    A unit's weights become multiples of 2^(e - 30), where their magnitudes sum to less than 2^e. So they sum to at most
    2^31 multiples, and products with features of 22 bits to 2^53. Only weights below 2^(e - 22) change: by at most
    2^(e - 31) each. Rounding twice reaches the fixed point, because the first time may carry the sum beyond 2^e.
    """
    # The first rounding is to bfloat16; what follows moves to a coarser grid where the sum needs it.
    rounded = w1.to(torch.bfloat16).double()
    for _ in range(2):
        _, exponents = torch.frexp(rounded.abs().sum(-1, keepdim=True))
        fields = exponents.clamp(min=LEAST_EXPONENT) - (WEIGHT_BITS - 1) + 1023
        # Powers are made of bits: `exp2` of a backend may be off by one unit.
        step = (fields.to(torch.int64) << 52).view(torch.float64)
        rounded = (rounded / step).round() * step
    return rounded.to(torch.bfloat16)


def problems_of(layer: int, params: Mapping[str, Tensor]) -> list[str]:
    """Return the problems of one layer's tensors."""
    problems = [f"layer.{layer}.{name} is missing" for name in PARAMETERS if name not in params]
    problems += [f"unknown tensor 'layer.{layer}.{name}'" for name in sorted(set(params) - set(PARAMETERS))]
    known = {name: tensor for name, tensor in params.items() if name in PARAMETERS}
    for name, tensor in known.items():
        if not tensor.is_floating_point():
            problems.append(f"layer.{layer}.{name} is {tensor.dtype}, expected float32")
        elif not tensor.float().isfinite().all():
            problems.append(f"layer.{layer}.{name} has values that are not finite")
        elif name == "w1" and tensor.dim() == 2 and (tensor.double().abs().sum(-1) > 2.0**LARGEST_EXPONENT).any():
            problems.append(f"layer.{layer}.w1 has a unit whose magnitudes sum to more than 2^{LARGEST_EXPONENT}")
    if "w1" in known:
        problems += _wrong_shapes(layer, known)
    return problems


def _wrong_shapes(layer: int, known: Mapping[str, Tensor]) -> list[str]:
    shape = tuple(known["w1"].shape)
    if len(shape) != 2 or shape[1] % 2 or 0 in shape:
        return [f"layer.{layer}.w1 has shape {list(shape)}, expected [units, 2 H]"]
    expected = {"b1": (shape[0],), "w2": (shape[0],), "b2": (1,)}
    return [
        f"layer.{layer}.{name} has shape {list(known[name].shape)}, expected {list(wanted)} as w1 is {list(shape)}"
        for name, wanted in expected.items()
        if name in known and tuple(known[name].shape) != wanted
    ]


def digest_of(layers: Mapping[int, LayerTensors]) -> str:
    """Return the SHA-256 of all names, shapes and values."""
    digest = hashlib.sha256()
    for layer, weights in sorted(layers.items()):
        for name, tensor in weights.params().items():
            digest.update(f"{layer}.{name}.{tuple(tensor.shape)}".encode())
            # Values are hashed as bytes, because numpy knows no bfloat16.
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# The file of a gate or a draft: safetensors with `layer.{l}.{name}` tensors, a format and a version.

_NAME = re.compile(r"layer\.(0|[1-9][0-9]*)\.([a-z0-9_]+)")


T = TypeVar("T")


def read_layers(path: str | Path, format: str, hint: str, make: Callable[[dict[int, dict[str, Tensor]], str], T]) -> T:
    """Return what `make` makes of layer -> name -> tensor and of the path.

    Raises:
        UserError: the file cannot be read. CompileError: another format or version; or tensors of no layer, with all
            that `make` refuses.
    """
    layers: dict[int, dict[str, Tensor]] = {}
    problems: list[CompileError] = []
    for name, tensor in sorted(read_gate_file(path, format, hint)[1].items()):
        match = _NAME.fullmatch(name)
        if match is None:
            problems.append(CompileError(f"unknown tensor {name!r}", where=str(path), hint=hint))
        else:
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    made = attempt(problems, partial(make, layers, str(path)))
    if made is None or problems:
        raise CompileError.collect(problems)
    return made


def read_gate_file(
    path: str | Path, format: str = FORMAT, hint: str = HINT
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and tensors by name.

    Raises:
        UserError: the file cannot be read. CompileError: the file has another format or version.
    """
    file_path = path_of("the file", path)
    try:
        refuse_pipe(file_path)
        with cast("Any", safe_open(str(file_path), "pt")) as file:  # its stub has no types
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"the weights cannot be read: {error}", where=str(path), hint=hint) from error
    found = metadata.get("format"), metadata.get("version")
    if found != (format, VERSION):
        what = f"the file has format {found[0]!r} version {found[1]!r}, expected {format!r} version {VERSION!r}"
        raise CompileError(what, where=str(path), hint=hint)
    return metadata, tensors


def write_gate_file(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], format: str = FORMAT
) -> None:
    """Write the file. A kill while writing leaves the old file.

    Raises:
        InputError: a tensor without values, or no path. UserError: the file cannot be written.
    """
    file = path_of("the file", path)
    try:
        # safetensors refuses tensors that share memory, so each is copied.
        own = {name: tensor.detach().cpu().to_dense().contiguous().clone() for name, tensor in tensors.items()}
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).partition("\n")[0]
        raise InputError(f"the tensors cannot be written: {text}", where=str(file), hint=HINT) from error
    replace_file(file, _ordered(save(own, {"format": format, "version": VERSION, **metadata})))


def _ordered(data: bytes) -> bytes:
    """Return the file with a sorted header: safetensors writes metadata in any order."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    # Padding to 8 bytes keeps the alignment that safetensors gives its data.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]
