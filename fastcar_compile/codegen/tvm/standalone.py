"""A library without TVM's runtime: flat entries as C, which calls the kernels itself. For WebAssembly.

After `flatten` an entry is a list of buffers, kernel calls and branches, and every shape is known. So the virtual
machine has nothing left to decide, and each statement is a statement of C.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import prod
from typing import Any, cast

import tvm
import tvm_ffi.libinfo
from tvm import relax

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.pipeline import check_of, flat_module, kernel_context
from fastcar_compile.codegen.tvm.relax_api import Shape, bindings_of, shape_of, with_functions
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.errors import InternalError

HEADER = "standalone.h"
"""What the C of every decoder includes: TVM's C ABI, as far as kernels use it."""

STACK_BYTES = 1 << 18
"""Stack of the library; a kernel keeps less than 1 KiB a buffer there."""

_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
"""DLPack's type codes."""


@dataclass(frozen=True)
class StandaloneSources:
    """What a linker makes the library of. kernels: writes the object file. text: the C file. entries: its functions."""

    kernels: Any
    text: str
    entries: tuple[str, ...]


def standalone_sources(module: tvm.IRModule, isa: InstructionSet, entries: Sequence[str]) -> StandaloneSources:
    """Return the sources of an imported module's library, with the kernels of an instruction set."""
    target = host_target(isa)
    with kernel_context():
        flat = flat_module(module, isa, entries)
        functions: dict[Any, Any] = dict(flat.functions_items())
        kernels = {v: f for v, f in functions.items() if not isinstance(f, relax.Function)}
        built = tvm.tirx.build(with_functions(flat, kernels), target=target)
    writer = _LibraryWriter()
    for name in entries:
        writer.add_entry(name, functions[flat.get_global_var(name)])
    return StandaloneSources(built, writer.text(), tuple(f for name in entries for f in (name, check_of(name))))


def link_command(compiler: str, isa: InstructionSet, entries: Iterable[str]) -> list[str]:
    """Return the command of zig that links C and object files, without its inputs and its output."""
    own, ffi = files(__package__ or "").joinpath(""), tvm_ffi.libinfo
    includes = dict.fromkeys(map(str, (own, ffi.find_include_path(), ffi.find_dlpack_include_path())))
    return [
        compiler,
        "cc",
        "-target",
        f"{isa.machine}-freestanding",
        "-mcpu=" + "+".join(["generic", *(f.removeprefix("+").replace("-", "_") for f in isa.features)]),
        "-std=c11",
        "-O2",
        "-s",
        *(f"-I{path}" for path in includes),
        "-Wl,--no-entry",
        "-Wl,--export=fastcar_allocate",
        *(f"-Wl,--export={name}" for name in entries),
        "-Wl,-z,stack-size=" + str(STACK_BYTES),
    ]


@dataclass
class _LibraryWriter:
    """Collects the C of entries.

    Attributes:
        _data: declarations of tensors, storages and constants. _code: functions.
        _kernels: names of the kernels that are called. _shapes: by shape, its name in C.
        _tensors: by variable, its tensor in C; a storage is an array.
    """

    _data: list[str] = field(default_factory=list[str])
    _code: list[str] = field(default_factory=list[str])
    _kernels: dict[str, None] = field(default_factory=dict[str, None])
    _shapes: dict[Shape, str] = field(default_factory=dict[Shape, str])
    _constants: dict[str, str] = field(default_factory=dict[str, str])
    _names: dict[relax.Var, str] = field(default_factory=dict[relax.Var, str])

    def text(self) -> str:
        """Return the file."""
        kernels = [f"KERNEL({name})" for name in self._kernels]
        return "\n".join([f'#include "{HEADER}"', *kernels, *self._data, *self._code, ""])

    def add_entry(self, name: str, function: relax.Function) -> None:
        """Add an entry, and the function that checks what it is given."""
        body = function.body
        assert isinstance(body, relax.SeqExpr)
        arguments = [self._tensor(var, var) for var in function.params]
        lines = [f"{tensor}.data = arguments[{i}];" for i, tensor in enumerate(arguments)]
        lines += self._statements(body)
        results = body.body.fields if isinstance(body.body, relax.Tuple) else [body.body]
        lines += [f"results[{i}] = {self._value(value)}.data;" for i, value in enumerate(results)]
        self._function(f"int32_t {name}(void **arguments, void **results)", lines)
        sizes = ", ".join(
            str(prod(shape_of(var)) * ((tvm.DataType(_dtype(var)).bits + 7) // 8)) for var in function.params
        )
        self._data.append(f"static const uint32_t {name}_bytes[] = {{{sizes}}};")
        lines = [f"return first_difference({name}_bytes, bytes, {len(function.params)});"]
        self._function(f"int32_t {check_of(name)}(const uint32_t *bytes)", lines, returns=False)

    def _function(self, head: str, lines: Iterable[str], *, returns: bool = True) -> None:
        end = ["    return 0;"] if returns else []
        self._code.append("\n".join([f"{head} {{", *(f"    {line}" for line in lines), *end, "}"]))

    def _statements(self, body: relax.Expr) -> list[str]:
        return [line for var, value in bindings_of(body) for line in self._statement(var, value)]

    def _statement(self, var: relax.Var, value: relax.Expr) -> list[str]:
        """Return the C of one binding."""
        if isinstance(value, relax.If):
            return self._branches(var, value)
        if isinstance(value, relax.Var | tvm.ir.GenericConst):
            return [f"{self._tensor(var, var)}.data = {self._value(value)}.data;"]
        if not isinstance(value, relax.Call):
            raise InternalError(f"a flat entry has a {type(value).__name__}, which has no form in C")
        if isinstance(value.op, tvm.ir.GlobalVar):
            self._kernels[value.op.name_hint] = None
            given = ", ".join(f"ARGUMENT({self._value(argument)})" for argument in value.args)
            return [f"CALL({value.op.name_hint}, {given});"]
        match _operator(value):
            case "relax.vm.alloc_storage":
                name = f"storage_{len(self._names)}"
                self._names[var] = name
                self._data.append(f"STORAGE({name}, {prod(map(int, cast(Any, value.args[0]).values))})")
                return []
            case "relax.vm.alloc_tensor":
                storage, at = self._names[cast(relax.Var, value.args[0])], cast(Any, value.args[1])
                offset = int(getattr(at, "value", at))
                return [f"{self._tensor(var, var)}.data = {storage} + {offset};"]
            case "vm.builtin.reshape":
                return [f"{self._tensor(var, var)}.data = {self._value(value.args[0])}.data;"]
            case name:
                raise InternalError(f"a flat entry calls {name}, which has no form in C")

    def _branches(self, var: relax.Var, value: relax.If) -> list[str]:
        result, lines = self._tensor(var, var), [f"if (*(const uint8_t *)({self._value(value.cond)}.data)) {{"]
        for branch, end in ((value.true_branch, "} else {"), (value.false_branch, "}")):
            assert isinstance(branch, relax.SeqExpr)
            inside = [*self._statements(branch), f"{result}.data = {self._value(branch.body)}.data;"]
            lines += [*(f"    {line}" for line in inside), end]
        return lines

    def _value(self, value: relax.Expr) -> str:
        if isinstance(value, relax.Var):
            return self._names[value]
        if isinstance(value, tvm.ir.GenericConst):
            return self._constant(value)
        raise InternalError(f"a kernel of a flat entry is given a {type(value).__name__}, which has no form in C")

    def _tensor(self, var: relax.Var, typed: relax.Expr, data: str = "0") -> str:
        """Declare the tensor of a variable, whose memory is set where the variable is bound."""
        self._names[var] = self._declared(f"t{len(self._names)}", typed, data)
        return self._names[var]

    def _declared(self, name: str, typed: relax.Expr, data: str) -> str:
        shape, dtype = shape_of(typed), tvm.DataType(_dtype(typed))
        if shape not in self._shapes:
            self._shapes[shape] = f"shape_{len(self._shapes)}"
            self._data.append(f"SHAPE({self._shapes[shape]}, {', '.join(map(str, shape)) or '1'})")
        code = _CODES[str(dtype).rstrip("0123456789")]
        self._data.append(f"TENSOR({name}, {data}, {len(shape)}, {code}, {dtype.bits}, {self._shapes[shape]})")
        return name

    def _constant(self, value: tvm.ir.GenericConst) -> str:
        data = cast(Any, value).value.numpy().tobytes()
        key = hashlib.sha256(data).hexdigest() + str(value.ty)
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            numbers = ", ".join(map(str, data))
            self._data.append(f"CONSTANT({name}_bytes, {numbers})")
            self._constants[key] = self._declared(name, value, f"(void *){name}_bytes")
        return self._constants[key]


def _operator(value: relax.Call) -> str:
    operator = value.op
    return str(operator.global_symbol) if isinstance(operator, relax.ExternFunc) else str(cast(Any, operator).name)


def _dtype(value: relax.Expr) -> str:
    return str(cast(Any, value.ty).dtype)
