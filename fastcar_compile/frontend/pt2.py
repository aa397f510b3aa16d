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

import dataclasses
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, _dict_to_dataclass, deserialize_scalar_type
from torch.export import ExportedProgram

from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.frontend.importer import SHAPE_HINT, WRAPPERS
from fastcar_compile.ir.provenance import is_identifier, is_path, operator_named
from fastcar_compile.support import limits
from fastcar_compile.support.values import parse_json, refuse_pipe

# What an exported program from a file may say, checked on torch's own typed form of it before torch builds a graph.


_KEPT_METADATA = ("stack_trace", "nn_module_stack")
"""What is kept of a node's metadata: where it is in the model and in its source."""

_BUILT_IN = ("_operator.getitem",)
_PYTREES = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")

_HINT_OPERATOR = "export without custom operators, or give the module itself to fastcar_compile.compile"
_HINT_TREE = "give and return tensors, or tuples, lists and dicts of them"
_HINT_FILE = "write the file with torch.export.save"


def check_program(program: schema.ExportedProgram) -> None:
    """Check everything that torch's deserialiser would evaluate, look up or import; drop what nothing here needs.

    Raises:
        CompileError: an operator, an expression, a pytree or a name is not allowed.
    """
    # Guards are Python source. Nothing here needs them or the metadata.
    program.guards_code = []
    program.graph_module.metadata = {}
    # Only symbols have ranges, so the shapes are not fixed.
    if program.range_constraints:
        raise _dynamic()
    for part in _parts(program):
        if wrong := [n for n in _identifiers(part) if n is not None and not is_identifier(n)]:
            raise CompileError(f"the exported program has a value of the name {wrong[0]!r:.80}", hint=_HINT_FILE)
        _check_part(part)


def check_name(name: Any) -> None:
    """Raise CompileError unless torch.fx can write the name into source code."""
    if not is_path(name):
        raise CompileError(f"the exported program has a tensor of the name {name!r:.80}", hint=_HINT_FILE)


def _parts(value: Any) -> Iterator[Any]:
    """Return every typed part of the program, outermost first."""
    if dataclasses.is_dataclass(value):
        yield value
        yield from (part for field in dataclasses.fields(value) for part in _parts(getattr(value, field.name, None)))
    elif isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        yield from (part for item in items for part in _parts(item))


def _check_part(part: Any) -> None:
    match part:
        case schema.SymExpr():
            raise _dynamic()
        case schema.CustomObjArgument():
            raise CompileError("the exported program holds an object that is not a tensor", hint=_HINT_OPERATOR)
        case schema.Node():
            part.metadata = {k: str(v) for k, v in part.metadata.items() if k in _KEPT_METADATA}
            _check_operator(part.target)
        case schema.Argument() if part.type == "as_operator":
            _check_operator(part.as_operator)
        case schema.ModuleCallSignature():
            _check_tree(part.in_spec)
            _check_tree(part.out_spec)
        case schema.InputSpec() | schema.OutputSpec():
            for name, value in vars(part.value).items():
                if name.endswith("_name") or isinstance(value, str):
                    check_name(value)
        case _:
            pass


def _identifiers(part: Any) -> Iterable[Any]:
    """Return the names in a part that torch.fx writes into source code as they are."""
    match part:
        case schema.Node():
            return (part.name, *(i.name for i in part.inputs if i.name))
        case schema.Graph():
            values = (part.tensor_values, part.sym_int_values, part.sym_bool_values, part.sym_float_values)
            return (name for names in (*values, part.custom_obj_values) for name in names)
        case schema.TensorArgument() | schema.TokenArgument() | schema.GraphArgument():
            return (part.name,)
        case schema.SymIntArgument() | schema.SymFloatArgument() | schema.SymBoolArgument() if part.type == "as_name":
            return (part.as_name,)
        case schema.Argument() if part.type == "as_string_to_argument":
            return part.as_string_to_argument
        case schema.ModuleCallSignature():
            return part.forward_arg_names or ()
        case _:
            return ()


def _check_operator(target: Any) -> None:
    """Raise unless `target` names an operator that computes: `torch.ops.aten.add.Tensor`, for example."""
    if target in _BUILT_IN:
        return
    match target.split(".") if isinstance(target, str) else []:
        case ["torch", "ops", "higher_order", name] if name in WRAPPERS:
            return
        case ["torch", "ops", "aten", name, overload] if operator_named("aten", name, overload) is not None:
            return
        case _:
            pass
    raise CompileError(f"the exported program calls {target!r:.120}, which no file may ask for", hint=_HINT_OPERATOR)


def _check_tree(text: Any) -> None:
    data = parse_json(text.encode()) if isinstance(text, str) else None
    if not (isinstance(data, list) and len(data) == 2 and isinstance(data[0], int)):
        raise CompileError("the exported program has a malformed pytree", hint=_HINT_FILE)
    _check_branch(data[1])


def _check_branch(tree: Any) -> None:
    if not isinstance(tree, dict) or tree.keys() - {"type", "context", "children_spec"}:
        raise CompileError("the exported program has a malformed pytree", hint=_HINT_FILE)
    if tree["type"] is not None and tree["type"] not in _PYTREES:
        raise CompileError(f"the exported program takes or returns a {tree['type']!r:.80}", hint=_HINT_TREE)
    context = parse_json(tree["context"].encode()) if isinstance(tree["context"], str) else tree["context"]
    keys = context if isinstance(context, list) else [] if context is None else [context]
    if not all(isinstance(key, str | int) for key in keys):
        what = "the exported program takes or returns a dict whose keys are neither strings nor whole numbers"
        raise CompileError(what, hint=_HINT_TREE)
    for child in tree["children_spec"]:
        _check_branch(child)


def _dynamic() -> CompileError:
    return CompileError("the exported program has dynamic shapes", hint=SHAPE_HINT)


# Weights and constants of a `.pt2` file: tensors, and nothing that would have to be unpickled freely.


_TENSOR_FILES = {"data/weights/": "weight_", "data/constants/": "tensor_"}
_HINT = "export a module whose parameters, buffers and constants are plain tensors on the CPU"


class Payloads:
    """The tensors of one program in an archive.

    Args:
        name: of the program. sizes: bytes of every part of the archive. reader: torch's of the archive.
    """

    def __init__(self, name: str, sizes: Mapping[str, int], reader: torch._C.PyTorchFileReader) -> None:
        self._name, self._sizes, self._reader = name, sizes, reader

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Return the "weights" (parameters and buffers) or the "constants" by name."""
        folder = f"data/{kind}/"
        config = self._reader.get_record(f"{folder}{self._name}_{kind}_config.json")
        typed: Any = _dict_to_dataclass(schema.PayloadConfig, parse_json(config))
        stored: dict[str, Tensor] = {}
        return {name: self._tensor(folder, name, meta, stored) for name, meta in typed.config.items()}

    def _tensor(self, folder: str, name: str, meta: schema.PayloadMeta, stored: dict[str, Tensor]) -> Tensor:
        check_name(name)
        place = meta.path_name
        if not place.startswith(_TENSOR_FILES[folder]) or f"{folder}{place}" not in self._sizes:
            raise CompileError(f"the file has no part for {name} of the exported program", hint=_HINT)
        if meta.use_pickle:
            return _plain(unpickled(self._reader.get_record(f"{folder}{place}"), name), name)
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
        raise CompileError(f"{name} of the exported program is not a plain tensor on the CPU", hint=_HINT)
    return value


def _strided(flat: Tensor, meta: schema.TensorMeta, name: str) -> Tensor:
    sizes, strides = [_whole(s, name) for s in meta.sizes], [_whole(s, name) for s in meta.strides]
    # Strides of 0 repeat elements: a few stored bytes could claim any size.
    repeated = (prod(sizes) - flat.numel()) * flat.element_size()
    if repeated > limits.EXPANDED_BYTES or (meta.device is not None and meta.device.type != "cpu"):
        raise CompileError(f"{name} of the exported program is not a plain tensor on the CPU", hint=_HINT)
    return torch.as_strided(flat, sizes, strides, _whole(meta.storage_offset, name))


def _whole(size: schema.SymInt, name: str) -> int:
    if size.type != "as_int" or type(size.value) is not int or size.value < 0:
        raise CompileError(f"{name} of the exported program has no fixed shape", hint=_HINT)
    return size.value


_PT2_HINT = "write it again with torch.export.save of torch 2.11 or later"


def load_exported(path: Path) -> ExportedProgram:
    """Return the program of a `.pt2` file; it has no sample inputs.

    Raises:
        CompileError: the program holds something that is not read from files, or has dynamic shapes.
        UserError: there is no such file, or it is not what torch.export.save writes.
    """
    try:
        refuse_pipe(path)
        return _program(path)
    except UserError as error:
        raise type(error)(error.what, where=error.where or str(path), hint=error.hint) from error
    except Exception as error:  # torch raises many kinds here; all of them mean the file is not what it should be
        text = str(error).partition("\n")[0][: limits.TEXT_ERROR] or type(error).__name__
        raise UserError(f"the exported program cannot be read: {text}", where=str(path), hint=_PT2_HINT) from error


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
    data: Any = parse_json(reader.get_record(models[0]), size=limits.GRAPH_BYTES)
    # Typed, but not built: torch has evaluated nothing of the file until `check_program` has passed.
    typed = _dict_to_dataclass(schema.ExportedProgram, data)
    if not isinstance(typed, schema.ExportedProgram):
        raise CompileError("the file holds no exported program", hint=_PT2_HINT)
    check_program(typed)
    tensors = Payloads(name, sizes, reader).tensors
    return ExportedProgramDeserializer().deserialize(typed, tensors("weights"), tensors("constants"), None)


def _check_total(path: Path, sizes: Mapping[str, int]) -> None:
    """Raise UserError for parts that would take more memory than the file has bytes: torch compresses nothing."""
    total, length = sum(sizes.values()), path.stat().st_size
    if total > length or len(sizes) > limits.TENSORS:
        what = f"the file of {length} bytes claims to hold {total} bytes in {len(sizes)} parts"
        raise UserError(what, hint=_PT2_HINT)
