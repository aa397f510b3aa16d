"""One call of an operator while it is lowered: its arguments by name, and what a converter emits for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from torch import Tensor, fx
from tvm import relax, te
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.registry import dispatch
from fastcar_compile.codegen.tvm.relax_api import (
    Shape,
    add_kernel,
    call_in_place,
    call_kernel,
    call_packed,
    dtype_of,
    reshape,
    shape_of,
    tensor_type,
    type_of,
)
from fastcar_compile.errors import InternalError
from fastcar_compile.ir.query import bound

Value = relax.Expr | tuple[relax.Expr, ...]
"""What a converter returns: the operator's result, or its results."""

FRESH = -1
"""The place of a result that is no argument, but a new tensor."""

_RESHAPE = tvm.ir.Op.get("relax.reshape")


@dataclass(frozen=True)
class Operand:
    """A tensor argument: its value in Relax, and its type as fx knows it."""

    value: relax.Expr
    shape: Shape
    dtype: str

    @property
    def rows(self) -> tuple[int, int]:
        """M and K of the tensor as a matrix of M rows of its last axis."""
        return math.prod(self.shape[:-1]), self.shape[-1]


@dataclass(frozen=True)
class Context:
    """What every call of one imported function shares.

    Attributes:
        builder: the module that is built.
        isa: the instruction set whose kernels are chosen.
        values: what was emitted for each node so far.
        literals: the function's own variables for the segment's literals.
        stock: TVM's converter of a node.
    """

    builder: relax.BlockBuilder
    isa: InstructionSet
    values: Mapping[fx.Node, Any]
    literals: Sequence[relax.Var]
    stock: Callable[[fx.Node], relax.Expr]


class Call:
    """A call that a converter lowers.

    Arguments are read by the names of the operator's schema, each with the type that the converter needs.
    """

    def __init__(self, node: fx.Node, context: Context) -> None:
        self._node, self._context = node, context
        self._builder = context.builder

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        return bound(self._node)

    @property
    def shape(self) -> Shape:
        """Shape of the one result."""
        return tuple(int(d) for d in self._node.meta["val"].shape)

    @property
    def dtype(self) -> str:
        """TVM's name of the type of the one result."""
        return dtype_of(self._node.meta["val"])

    @property
    def results(self) -> list[Tensor]:
        """Fake tensors of several results."""
        return list(self._node.meta["val"])

    def tensor(self, name: str) -> Operand:
        """Return a tensor argument.

        Raises:
            InternalError: the argument is no tensor.
        """
        operand = self.optional(name)
        if operand is None:
            raise InternalError(f"argument {name} of {self._node.name} is None, not a tensor")
        return operand

    def optional(self, name: str) -> Operand | None:
        """Return a tensor argument that may be None."""
        node = self._arguments[name]
        return None if node is None else self._operand(node)

    def tensors(self, name: str) -> list[Operand]:
        """Return an argument that is a list of tensors."""
        return [self._operand(node) for node in self._arguments[name]]

    def optionals(self, name: str) -> list[Operand | None]:
        """Return an argument that is a list of tensors, any of which may be None."""
        return [None if node is None else self._operand(node) for node in self._arguments[name]]

    def values(self, *names: str) -> list[relax.Expr]:
        """Return the Relax values of tensor arguments."""
        return [self.tensor(name).value for name in names]

    def is_none(self, name: str) -> bool:
        """Return whether an argument that may be None is."""
        return self._arguments[name] is None

    def integer(self, name: str) -> int:
        """Return an integer argument, or a truth value as 0 or 1."""
        return int(self._arguments[name])

    def number(self, name: str) -> float:
        """Return a float argument."""
        return float(self._arguments[name])

    def text(self, name: str) -> str:
        """Return a text argument."""
        return str(self._arguments[name])

    def numbers(self, name: str) -> list[Any]:
        """Return an argument that is a list of numbers."""
        return list(self._arguments[name])

    def literal(self, name: str) -> relax.Var:
        """Return the function's variable for an argument that names the layer."""
        return self._context.literals[self.integer(name)]

    def stock(self) -> relax.Expr:
        """Emit what TVM's own converter makes of the call."""
        return self._context.stock(self._node)

    def dispatch(self, kind: str, *options: Any) -> PrimFunc:
        """Return the kernel of that kind for the instruction set that is lowered for."""
        return dispatch(self._context.isa, kind, *options)

    def emit(self, value: relax.Expr) -> relax.Var:
        """Bind a value to a variable."""
        return self._builder.emit(value)

    def kernel(self, function: PrimFunc, args: Sequence[relax.Expr], shape: Shape | None = None) -> relax.Var:
        """Emit a kernel of one result with the call's own dtype, and by default its shape."""
        out = tensor_type(self.shape if shape is None else shape, self.dtype)
        return self.emit(call_kernel(add_kernel(self._builder, function), args, out))

    def kernels(
        self, function: PrimFunc, args: Sequence[relax.Expr], types: Sequence[tuple[Shape, str]]
    ) -> list[relax.Var]:
        """Emit a kernel of several results of these shapes and dtypes."""
        outs = [tensor_type(shape, dtype) for shape, dtype in types]
        # A kernel of several results returns a tuple. Its elements
        # are bound one by one, so that later passes see variables.
        both = self.emit(call_kernel(add_kernel(self._builder, function), args, outs))
        return [self.emit(relax.TupleGetItem(both, i)) for i in range(len(outs))]

    def elementwise(self, function: Callable[[Any], Any]) -> relax.Var:
        """Emit a kernel that applies a function to every element of `self`; TVM may fuse it with others."""
        name = function.__name__

        def kernel(x: Any) -> Any:
            return te.compute(self.shape, lambda *at: function(x(*at)), name=name)

        return self._builder.emit_te(kernel, self.tensor("self").value, primfunc_name_hint=name)

    def in_place(self, function: PrimFunc, args: Sequence[relax.Expr]) -> relax.Var:
        """Emit a kernel that writes into its first argument, which is also the result: nothing copies a cache."""
        # Place 0: the result's memory is that of the cache, which the caller gave as state.
        out = tensor_type(self.shape, self.dtype)
        return self.emit(call_in_place(add_kernel(self._builder, function), args, [0], [out]))

    def partly_in_place(
        self, function: PrimFunc, args: Sequence[relax.Expr], places: Sequence[int]
    ) -> tuple[relax.Var, ...]:
        """Emit a kernel of several results: each is the argument at its place, which is written to, or `FRESH`."""
        outs = [type_of(value) for value in self.results]
        both = self.emit(call_in_place(add_kernel(self._builder, function), args, places, outs))
        return tuple(self.emit(relax.TupleGetItem(both, i)) for i in range(len(outs)))

    def packed(self, name: str, args: Sequence[relax.Expr]) -> relax.Var:
        """Emit a call of a packed function that the runtime registers."""
        val = self._node.meta["val"]
        return self.emit(call_packed(name, args, type_of(val) if isinstance(val, Tensor) else [*map(type_of, val)]))

    def reshape(self, value: relax.Expr, shape: Shape) -> relax.Expr:
        """Return the value in another shape. A reshape of a reshape is one: TVM would fuse two into a copy."""
        while (before := self._reshaped(value)) is not None:
            value = before
        return value if shape_of(value) == shape else self.emit(reshape(value, shape))

    def constant(self, value: np.ndarray) -> relax.Expr:
        """Return an array as a constant of the module."""
        return relax.const(value, str(value.dtype))

    def _operand(self, node: fx.Node) -> Operand:
        val = node.meta["val"]
        return Operand(self._context.values[node], tuple(int(d) for d in val.shape), dtype_of(val))

    def _reshaped(self, value: relax.Expr) -> relax.Expr | None:
        """Return what the value is a reshape of; None where it is none."""
        made = self._builder.lookup_binding(value) if isinstance(value, relax.Var) else None
        return made.args[0] if isinstance(made, relax.Call) and made.op == _RESHAPE else None
