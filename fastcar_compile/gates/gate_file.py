"""The file of a trained gate: safetensors with `layer.{l}.{name}` tensors, a format and a version."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastcar_compile.errors import CompileError, InputError, UserError, os_errors
from fastcar_compile.gates.weights import FORMAT, HINT, VERSION
from fastcar_compile.values import path_of, refuse_pipe

__all__ = ["HINT", "read_gate_file", "replace_file", "write_gate_file"]


def read_gate_file(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and tensors by name.

    Raises:
        UserError: it cannot be read. CompileError: another format or version.
    """
    file_path = path_of("the gate's file", path)
    try:
        refuse_pipe(file_path)
        with cast("Any", safe_open(str(file_path), "pt")) as file:  # its stub has no types
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"the gate's weights cannot be read: {error}", where=str(path), hint=HINT) from error
    found = metadata.get("format"), metadata.get("version")
    if found != (FORMAT, VERSION):
        what = f"the file has format {found[0]!r} version {found[1]!r}, expected {FORMAT!r} version {VERSION!r}"
        raise CompileError(what, where=str(path), hint=HINT)
    return metadata, tensors


def write_gate_file(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
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
        raise InputError(f"the gate's tensors cannot be written: {text}", where=str(file), hint=HINT) from error
    replace_file(file, _ordered(save(own, {"format": FORMAT, "version": VERSION, **metadata})))


def replace_file(path: Path, data: bytes) -> None:
    """Write the file whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    with os_errors("the file cannot be written", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        try:
            scratch.write_bytes(data)
            os.replace(scratch, path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise


def _ordered(data: bytes) -> bytes:
    """Return the file with a sorted header: safetensors writes metadata in any order."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    # Padding to 8 bytes keeps the alignment that safetensors gives its data.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]
