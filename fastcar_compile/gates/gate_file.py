"""The file of a trained gate: safetensors with `layer.{l}.{name}` tensors, a format and a version."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastcar_compile.errors import CompileError, UserError

FORMAT, VERSION = "fastcar-gate", "1"
HINT = (
    f"give a safetensors file with metadata format {FORMAT!r}, version {VERSION!r}, and for every layer l "
    "layer.l.w1 [units, 2 H], layer.l.b1 [units], layer.l.w2 [units], layer.l.b2 [1] (docs/explanation/gates.md)"
)


def read_gate_file(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors by name.

    Raises:
        UserError: it cannot be read. CompileError: another format or version.
    """
    try:
        with safe_open(str(path), "pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"the gate's weights cannot be read: {error}", where=str(path), hint=HINT) from error
    found = metadata.get("format"), metadata.get("version")
    if found != (FORMAT, VERSION):
        what = f"the file has format {found[0]!r} version {found[1]!r}, expected {FORMAT!r} version {VERSION!r}"
        raise CompileError(what, where=str(path), hint=HINT)
    return metadata, tensors


def write_gate_file(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the file; a kill while writing leaves the file before."""
    replace_file(Path(path), _ordered(save(dict(tensors), {"format": FORMAT, "version": VERSION, **metadata})))


def replace_file(path: Path, data: bytes) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(data)
    os.replace(scratch, path)


def _ordered(data: bytes) -> bytes:
    """safetensors orders metadata by chance: its header is written again with sorted keys."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]
