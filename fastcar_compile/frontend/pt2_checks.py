"""What an exported program from a file may say, checked on torch's own typed form of it before torch builds a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch._export.serde import schema

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.names import is_identifier, is_path, operator_named
from fastcar_compile.strict_json import parse_json

_KEPT_METADATA = ("stack_trace", "nn_module_stack")
"""What is kept of a node's metadata: where it is in the model and in its source."""

_MODES = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operators that take a graph; the importer puts its body in their place."""

_BUILT_IN = ("_operator.getitem",)
_PYTREES = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")

_HINT_SHAPE = "export the step for fixed shapes: one token per row [B, 1] (or [B, 1, H]) and cache_position [1]"
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
    elif isinstance(value, list):
        yield from (part for item in value for part in _parts(item))
    elif isinstance(value, dict):
        yield from (part for item in value.values() for part in _parts(item))


def _check_part(part: Any) -> None:
    _check_identifiers(_identifiers(part))
    match part:
        case schema.SymExpr():
            raise _dynamic()
        case schema.CustomObjArgument():
            raise CompileError("the exported program holds an object that is no tensor", hint=_HINT_OPERATOR)
        case schema.Node():
            part.metadata = {k: str(v) for k, v in part.metadata.items() if k in _KEPT_METADATA}
            _check_operator(part.target)
        case schema.Argument() if part.type == "as_operator":
            _check_operator(part.as_operator)
        case schema.ModuleCallSignature():
            _check_tree(part.in_spec)
            _check_tree(part.out_spec)
        case schema.InputSpec() | schema.OutputSpec():
            for field in dataclasses.fields(part.value):
                _check_target(field.name, getattr(part.value, field.name))
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


def _check_target(field: str, value: Any) -> None:
    if field.endswith("_name") or isinstance(value, str):
        check_name(value)


def _check_identifiers(names: Iterable[Any]) -> None:
    for name in names:
        if name is not None and not is_identifier(name):
            raise CompileError(f"the exported program has a value of the name {name!r:.80}", hint=_HINT_FILE)


def _check_operator(target: Any) -> None:
    """Raise unless `target` names an operator that computes: `torch.ops.aten.add.Tensor`, for example."""
    if target in _BUILT_IN:
        return
    match target.split(".") if isinstance(target, str) else []:
        case ["torch", "ops", "higher_order", name] if name in _MODES:
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
        raise CompileError("the exported program takes or returns a dict whose keys are no texts", hint=_HINT_TREE)
    for child in tree["children_spec"]:
        _check_branch(child)


def _dynamic() -> CompileError:
    return CompileError("the exported program has dynamic shapes", hint=_HINT_SHAPE)
