"""TVM's functions with the types that they take: its annotations are missing or narrower."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import tvm
from torch import Tensor, fx
from tvm import relax
from tvm.ir import GlobalVar, StringImm
from tvm.tirx import IntImm, PrimFunc

from fastcar_compile.codegen.segment import Segment
from fastcar_compile.ir.query import output_nodes

Shape = tuple[int, ...]
Values = dict[relax.Var, relax.Expr]
"""Variable -> what stands for it."""
untyped: Any = relax
"""Relax for calls whose arguments its annotations do not allow, such as lists of expressions."""


def tensor_type(shape: Sequence[int], dtype: str) -> relax.TensorType:
    """Return the type of a tensor."""
    return relax.TensorType(cast(Any, tuple(shape)), dtype)


def type_of(value: Tensor) -> relax.TensorType:
    """Return the type of a fake tensor."""
    return tensor_type([int(d) for d in value.shape], dtype_of(value))


def dtype_of(value: Tensor) -> str:
    """Return TVM's name of a tensor's dtype."""
    return str(value.dtype).removeprefix("torch.")


def shape_of(value: relax.Expr) -> Shape:
    """Return the shape of a value that is a tensor."""
    return tuple(int(d) for d in cast(Any, value.ty).shape)


def add_kernel(builder: relax.BlockBuilder, kernel: PrimFunc) -> tvm.ir.GlobalVar:
    """Add a kernel to the module under its own name; equal kernels are one."""
    return builder.add_func(kernel, cast(Any, kernel).__name__)


def bindings_of(body: relax.Expr) -> Iterator[tuple[relax.Var, relax.Expr]]:
    """Return the variables of a normalised body with their values, in order; those inside of branches are left out."""
    assert isinstance(body, relax.SeqExpr)
    for part in body.blocks:
        for binding in part.bindings:
            yield binding.var, cast(relax.VarBinding, binding).value  # nothing here makes a MatchCast


def operator_of(value: relax.Expr) -> object:
    """Return what a call calls; None of another value."""
    return value.op if isinstance(value, relax.Call) else None


def packed_name(value: relax.Expr) -> str:
    """Return the name of the packed function that the value is a call of; empty of another value."""
    operator = operator_of(value)
    return str(operator.global_symbol) if isinstance(operator, relax.ExternFunc) else ""


def replaced(value: relax.Expr, values: Values) -> relax.Expr:
    """Return the expression with its variables replaced, an element of a known tuple as that element."""
    if isinstance(value, relax.Var):
        return values.get(value, value)
    if isinstance(value, relax.Call):
        return relax.Call(value.op, [replaced(a, values) for a in value.args], value.attrs, value.ty_args, value.span)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([replaced(f, values) for f in value.fields])
    if isinstance(value, relax.TupleGetItem):
        whole = replaced(value.tuple_value, values)
        return whole.fields[value.index] if isinstance(whole, relax.Tuple) else relax.TupleGetItem(whole, value.index)
    return value


def module_pass(name: str, run: Callable[[tvm.IRModule], tvm.IRModule]) -> tvm.transform.Pass:
    """Return a function on modules as a pass of this name."""

    def step(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return run(module)

    return cast(Any, tvm.transform.module_pass)(step, opt_level=0, name=name)


def with_functions(module: tvm.IRModule, functions: Mapping[tvm.ir.GlobalVar, Any]) -> tvm.IRModule:
    """Return a module of these functions with the attributes of another."""
    return tvm.IRModule(dict(functions), attrs=cast(Any, module).attrs)


def parameters(segments: Sequence[Segment]) -> dict[str, fx.Node]:
    """Return a node for every parameter, by its attribute path. Several nodes may read one parameter."""
    found: dict[str, fx.Node] = {}
    for node in (n for part in segments for n in part.inputs if n.op == "get_attr"):
        found.setdefault(str(node.target), node)
    return found


def add_entry(
    builder: relax.BlockBuilder,
    name: str,
    module: fx.GraphModule,
    segments: Sequence[Segment],
    functions: Mapping[str, GlobalVar],
) -> None:
    """Add the entry. Its arguments are the graph's placeholders, then the parameters.

    Args:
        builder: the module.
        name: of the entry.
        module: the graph that the segments are parts of.
        segments: in order.
        functions: the function of every segment's key.
    """
    arguments = [*module.graph.find_nodes(op="placeholder"), *parameters(segments).values()]
    variables = [relax.Var(f"argument_{i}", type_of(n.meta["val"])) for i, n in enumerate(arguments)]
    values: dict[Any, Any] = dict(zip(map(_identity, arguments), variables, strict=True))
    with builder.function(name, variables):
        for part in segments:
            # What differs between equal layers, their number or name, is an argument: so they share one function.
            literals = [IntImm("int64", v) if isinstance(v, int) else StringImm(v) for v in part.literals]
            call = relax.Call(functions[part.key], [*(values[_identity(n)] for n in part.inputs), *literals])
            result = builder.emit(call)
            for i, node in enumerate(part.outputs):
                values[node] = result if len(part.outputs) == 1 else builder.emit(relax.TupleGetItem(result, i))
        builder.emit_func_output(relax.Tuple([values[n] for n in output_nodes(module.graph)]))


def add_draw(builder: relax.BlockBuilder, kernel: PrimFunc) -> None:
    """Add the entry `draw`, which is a kernel whose last argument is its result."""
    *given, result = cast(Any, kernel).params
    given = [relax.Var(b.name, tensor_type(b.shape, str(b.dtype))) for b in given]
    with builder.function("draw", given):
        call: Any = untyped.call_tir(add_kernel(builder, kernel), given, tensor_type(result.shape, str(result.dtype)))
        builder.emit_func_output(relax.Tuple([builder.emit(call)]))


def _identity(node: fx.Node) -> object:
    """Return what a value is known by: a parameter is one value however many nodes read it."""
    return str(node.target) if node.op == "get_attr" else node
