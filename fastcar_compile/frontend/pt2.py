"""`.pt2` files: an exported program is read without running anything that is in the file.

`torch.export.load` is not used: it unpickles sample inputs, weights and constants without restriction, and its
deserialiser evaluates texts of the file: symbolic expressions as Python, operators as attributes of `torch`, names of
tensors as source code, classes of a pytree as modules to import. So everything is checked before torch sees it:

| part of the file | what is done |
|---|---|
| sample inputs, extra files, AOTInductor libraries | not read |
| pickled weights and constants | `torch.load(weights_only=True)`, and they must be plain tensors |
| custom and opaque objects | refused |
| operators | a registered operator of ATen, or one that only sets a mode |
| symbolic expressions | refused: a decode step has fixed shapes |
| pytrees | tuples, lists and dicts |
| names | of letters, digits and a few signs, so that they cannot be read as code |
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, _dict_to_dataclass
from torch.export import ExportedProgram

from fastcar_compile import limits
from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.frontend.pt2_checks import check_program
from fastcar_compile.frontend.pt2_tensors import Payloads, only_tensors
from fastcar_compile.strict_json import parse_json
from fastcar_compile.values import refuse_pipe

_OLD = "serialized_exported_program.json"
"""In a file of torch 2.7 or older."""

_HINT = "write it again with torch.export.save of torch 2.8 or later"


def load_exported(path: Path) -> ExportedProgram:
    """Return the program of a `.pt2` file; it has no sample inputs.

    Raises:
        CompileError: the program holds something that is not read from files, or has dynamic shapes.
        UserError: there is no such file, or it is not what torch.export.save writes.
    """
    try:
        refuse_pipe(path)
        return _old_program(path) if _is_old(path) else _program(path)
    except UserError as error:
        raise type(error)(error.what, where=error.where or str(path), hint=error.hint) from error
    except Exception as error:  # torch raises many kinds here; all of them mean the file is not what it should be
        text = str(error).partition("\n")[0][: limits.TEXT_ERROR] or type(error).__name__
        raise UserError(f"the exported program cannot be read: {text}", where=str(path), hint=_HINT) from error


def _is_old(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return _OLD in archive.namelist()


def _program(path: Path) -> ExportedProgram:
    reader = torch._C.PyTorchFileReader(os.fspath(path))
    # Sizes are checked before any record is read.
    sizes = {name: int(reader.get_record_size(name)) for name in reader.get_all_records()}
    _check_total(path, sizes)
    models = [name for name in sizes if name.startswith("models/") and name.endswith(".json")]
    if len(models) != 1:
        what = f"the file holds {len(models)} exported programs, expected one"
        raise UserError(what, hint="write it with torch.export.save")
    name = models[0].removeprefix("models/").removesuffix(".json")
    payloads = Payloads(name, sizes, reader)
    return _built(reader.get_record(models[0]), payloads.weights, payloads.constants)


def _old_program(path: Path) -> ExportedProgram:
    with zipfile.ZipFile(path) as archive:
        _check_total(path, {entry.filename: entry.file_size for entry in archive.infolist()})
        program = archive.read(_OLD)
        weights, constants = (archive.read(f"serialized_{part}.pt") for part in ("state_dict", "constants"))
    return _built(
        program, lambda: only_tensors(weights, "the weights"), lambda: only_tensors(constants, "the constants")
    )


def _check_total(path: Path, sizes: Mapping[str, int]) -> None:
    """Raise UserError for parts that would take more memory than the file has bytes: torch compresses nothing."""
    total, length = sum(sizes.values()), path.stat().st_size
    if total > length or len(sizes) > limits.TENSORS:
        what = f"the file of {length} bytes claims to hold {total} bytes in {len(sizes)} parts"
        raise UserError(what, hint=_HINT)


Tensors = Callable[[], dict[str, Tensor]]


def _built(program: bytes, weights: Tensors, constants: Tensors) -> ExportedProgram:
    data: Any = parse_json(program, size=limits.GRAPH_BYTES)
    # Typed, but not built: torch has evaluated nothing of the file until `check_program` has passed.
    typed = _dict_to_dataclass(schema.ExportedProgram, data)
    if not isinstance(typed, schema.ExportedProgram):
        raise CompileError("the file holds no exported program", hint=_HINT)
    check_program(typed)
    return ExportedProgramDeserializer().deserialize(typed, weights(), constants(), None)
