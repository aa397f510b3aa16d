"""TVM's functions with the types that they take: its annotations are missing or narrower. All casts are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import tvm
from torch import Tensor
from tvm import relax
from tvm.tirx import PrimFunc

Shape = tuple[int, ...]
Types = relax.TensorType | list[relax.TensorType]


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


def call_kernel(kernel: tvm.ir.GlobalVar, args: Sequence[relax.Expr], out: Types) -> relax.Call:
    """Return a call of a kernel that writes into new tensors."""
    return relax.call_tir(kernel, cast(Any, list(args)), out)


def call_in_place(
    kernel: tvm.ir.GlobalVar, args: Sequence[relax.Expr], places: Sequence[int], outs: Sequence[relax.TensorType]
) -> relax.Call:
    """Return a call of a kernel whose results are the arguments at these places; at -1, new tensors."""
    types = outs[0] if len(outs) == 1 else list(outs)
    return relax.op.call_tir_inplace(kernel, cast(Any, list(args)), list(places), types)


def call_packed(name: str, args: Sequence[relax.Expr], out: Types) -> relax.Call:
    """Return a call of a packed function of the runtime."""
    return relax.call_dps_packed(name, cast(Any, list(args)), out)


def reshape(value: relax.Expr, shape: Shape) -> relax.Expr:
    """Return the value in another shape."""
    return relax.op.reshape(value, cast(Any, shape))


def broadcast(value: relax.Expr, shape: Shape) -> relax.Expr:
    """Return the value repeated to a shape."""
    return relax.op.broadcast_to(value, cast(Any, shape))


def block(bindings: Sequence[relax.Binding]) -> relax.BindingBlock:
    """Return a block of statements."""
    return relax.BindingBlock(list(bindings))


def body_of(function: relax.Function) -> relax.SeqExpr:
    """Return the body of a normalised function."""
    assert isinstance(function.body, relax.SeqExpr)
    return function.body


def bindings_of(body: relax.Expr) -> Iterator[tuple[relax.Var, relax.Expr]]:
    """Return the variables of a normalised body with their values, in order; those inside of branches are left out."""
    assert isinstance(body, relax.SeqExpr)
    for part in body.blocks:
        for binding in part.bindings:
            yield binding.var, cast(relax.VarBinding, binding).value  # nothing here makes a MatchCast


def module_pass(name: str, run: Callable[[tvm.IRModule], tvm.IRModule]) -> tvm.transform.Pass:
    """Return a function on modules as a pass of this name."""

    def step(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return run(module)

    return cast(Any, tvm.transform.module_pass)(step, opt_level=0, name=name)


def with_functions(module: tvm.IRModule, functions: Mapping[tvm.ir.GlobalVar, Any]) -> tvm.IRModule:
    """Return a module of these functions with the attributes of another."""
    return tvm.IRModule(dict(functions), attrs=cast(Any, module).attrs)
