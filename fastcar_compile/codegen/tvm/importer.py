"""Import of fx graphs: each becomes a Relax function, its operators the calls that the converters emit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import torch
import tvm
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import default_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Target, map_arg
from tvm import relax, te
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.registry import dispatch
from fastcar_compile.codegen.tvm.relax_api import Shape, add_kernel, dtype_of, shape_of, tensor_type, type_of, untyped
from fastcar_compile.errors import CompileError, InternalError
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import bound, get_attribute, output_nodes, tensor_attribute

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


class OperatorCall:
    """A call that a converter lowers.

    Arguments are read by the names of the operator's schema, each with the type that the converter needs.
    """

    def __init__(self, node: fx.Node, importer: SegmentImporter) -> None:
        self._node, self._importer = node, importer
        self._builder = importer.block_builder

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        return bound(self._node)

    @property
    def target(self) -> Target:
        """The operator."""
        return self._node.target

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
        return None if node is None else self.operand(node)

    def tensors(self, name: str) -> list[Operand]:
        """Return an argument that is a list of tensors."""
        return [self.operand(node) for node in self._arguments[name]]

    def of(self, node: fx.Node) -> OperatorCall:
        """Return the call of another node, which this one takes in."""
        return OperatorCall(node, self._importer)

    def node(self, name: str) -> fx.Node:
        """Return the node of a tensor argument."""
        return self._arguments[name]

    def values(self, *names: str) -> list[relax.Expr]:
        """Return the Relax values of tensor arguments."""
        return [self.tensor(name).value for name in names]

    def has(self, name: str) -> bool:
        """Return whether the operator has such an argument, and it is not None."""
        return self._arguments.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        """Return an argument that is no tensor."""
        return self._arguments[name]

    def literal(self, name: str) -> relax.Var:
        """Return the function's variable for an argument that names the layer."""
        return self._importer.literals[int(self[name])]

    def stock(self) -> relax.Expr:
        """Emit what TVM's own converter makes of the call."""
        return self._importer.stock(self._node)

    def dispatch(self, kind: str, *options: Any) -> PrimFunc:
        """Return the kernel of that kind for the instruction set that is lowered for."""
        return dispatch(self._importer.isa, kind, *options)

    def emit(self, value: relax.Expr) -> relax.Var:
        """Bind a value to a variable."""
        return self._builder.emit(value)

    def kernel(
        self, function: PrimFunc, args: Sequence[relax.Expr], shape: Shape | None = None, dtype: str | None = None
    ) -> relax.Var:
        """Emit a kernel of one result, by default with the call's own shape and dtype."""
        out = tensor_type(self.shape if shape is None else shape, dtype or self.dtype)
        return self.emit(untyped.call_tir(add_kernel(self._builder, function), list(args), out))

    def kernels(
        self, function: PrimFunc, args: Sequence[relax.Expr], types: Sequence[tuple[Shape, str]]
    ) -> list[relax.Var]:
        """Emit a kernel of several results of these shapes and dtypes."""
        outs = [tensor_type(shape, dtype) for shape, dtype in types]
        return self._elements(untyped.call_tir(add_kernel(self._builder, function), list(args), outs), len(outs))

    def elementwise(self, function: Callable[[Any], Any]) -> relax.Var:
        """Emit a kernel that applies a function to every element of `self`; TVM may fuse it with others."""
        name = function.__name__

        def kernel(x: Any) -> Any:
            return te.compute(self.shape, lambda *at: function(x(*at)), name=name)

        return self._builder.emit_te(kernel, self.tensor("self").value, primfunc_name_hint=name)

    def in_place(self, function: PrimFunc, args: Sequence[relax.Expr], places: Sequence[int] = (0,)) -> Value:
        """Emit a kernel whose results are arguments at these places, which it writes to, or `FRESH`.

        Nothing copies a cache: the memory of such a result is that of the argument, which the caller gave as state.
        """
        call = untyped.op.call_tir_inplace(add_kernel(self._builder, function), list(args), list(places), self._out)
        return self.emit(call) if len(places) == 1 else tuple(self._elements(call, len(places)))

    def packed(self, name: str, args: Sequence[relax.Expr]) -> relax.Var:
        """Emit a call of a packed function that the runtime registers."""
        return self.emit(untyped.call_dps_packed(name, list(args), self._out))

    @property
    def _out(self) -> Any:
        """The type of the one result, or those of several."""
        val = self._node.meta["val"]
        return type_of(val) if isinstance(val, Tensor) else [*map(type_of, val)]

    def reshape(self, value: relax.Expr, shape: Shape) -> relax.Expr:
        """Return the value in another shape. A reshape of a reshape is one: TVM would fuse two into a copy."""
        made = self._builder.lookup_binding(value) if isinstance(value, relax.Var) else None
        if isinstance(made, relax.Call) and made.op == _RESHAPE:
            return self.reshape(made.args[0], shape)
        return value if shape_of(value) == shape else self.emit(untyped.op.reshape(value, shape))

    def constant(self, value: np.ndarray) -> relax.Expr:
        """Return an array as a constant of the module."""
        return relax.const(value, str(value.dtype))

    def _elements(self, value: relax.Expr, count: int) -> list[relax.Var]:
        """Bind a tuple and its elements one by one, so that later passes see variables."""
        several = self.emit(value)
        return [self.emit(relax.TupleGetItem(several, i)) for i in range(count)]

    def operand(self, node: fx.Node) -> Operand:
        """Return what a node stands for."""
        val = node.meta["val"]
        return Operand(self._importer.env[node], tuple(int(d) for d in val.shape), dtype_of(val))


Converter = Callable[[OperatorCall], Value]
CONVERTERS: dict[Target, Converter] = {}
"""Operator -> what lowers it. TVM's importer lowers the operators that are not here."""


def converts(*operators: OpOverload) -> Callable[[Converter], Converter]:
    """Register a function as the converter of these operators."""

    def register(converter: Converter) -> Converter:
        CONVERTERS.update(dict.fromkeys(operators, converter))
        return converter

    return register


_COND = torch.ops.higher_order.cond


class SegmentImporter(ExportedProgramImporter):
    """Adds fx graphs to a module as functions.

    A segment is an fx graph whose values are known, so it needs neither an ExportedProgram nor its re-tracing: of TVM's
    importer this uses the converters of single operators, for those that have none here.

    Args:
        builder: the module.
        isa: the instruction set whose kernels are chosen.
    """

    converters: Mapping[Target, Converter] = CONVERTERS

    def __init__(self, builder: relax.BlockBuilder, isa: InstructionSet) -> None:
        super().__init__()
        self.block_builder, self.isa = builder, isa
        # The made function has variables for the literals of its segment: integers or texts that the entry knows.
        self.literals: Sequence[relax.Var] = ()

    def knows(self, target: Target) -> bool:
        """Whether an operator can be imported."""
        return self._converts(target) or target in _decompositions()

    def _converts(self, target: Target) -> bool:
        return target is _COND or target in self.converters or _name(target) in self.convert_map

    def add_function(self, module: fx.GraphModule, name: str, literals: int) -> tvm.ir.GlobalVar:
        """Add a graph of placeholders, operators and branches. Its branches become functions before it does.

        Args:
            module: the graph.
            name: of the function.
            literals: how many arguments it takes after its placeholders. Its branches take the same.

        Raises:
            CompileError: TVM cannot import an operator.
        """
        # The arms of an `If` are calls: a branch is a function of its own, which takes what `cond` passes.
        branches = {
            node: self.add_function(_branch(module, node), f"{name}_{node.target}", literals)
            for node in module.graph.find_nodes(op="get_attr")
        }
        placeholders = module.graph.find_nodes(op="placeholder")
        arguments = [relax.Var(n.name, type_of(n.meta["val"])) for n in placeholders]
        self.literals = [relax.Var(f"literal_{i}", relax.AnyType()) for i in range(literals)]
        values: dict[fx.Node, Any] = {**branches, **dict(zip(placeholders, arguments, strict=True))}
        # TVM's converters look up their operands in `env`.
        self.env = values
        with self.block_builder.function(name, [*arguments, *self.literals]):
            for node in [n for n in module.graph.nodes if n.op == "call_function"]:
                values[node] = self._emit(node)
            results = [values[n] for n in output_nodes(module.graph)]
            self.block_builder.emit_func_output(results[0] if len(results) == 1 else results)
        return self.block_builder.get().get_global_var(name)

    def _emit(self, node: fx.Node) -> Value:
        if node.target is _COND:
            return self._emit_cond(node)
        if not self._converts(node.target):
            return self._emit_parts(node)
        converter = self.converters.get(node.target)
        return self.stock(node) if converter is None else converter(OperatorCall(node, self))

    def _emit_parts(self, node: fx.Node) -> Value:
        """Emit an operator that nothing converts as the operators that PyTorch decomposes it into.

        Raises:
            CompileError: nothing converts one of those either.
        """
        sources = node.all_input_nodes

        def call(*values: Tensor) -> Any:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), dict(zip(sources, values, strict=True)).__getitem__)
            return cast("Callable[..., Any]", node.target)(*args, **kwargs)

        table = {op: rule for op, rule in _decompositions().items() if not self._converts(op)}
        traced = make_fx(call, decomposition_table=table)(*(n.meta["val"] for n in sources))
        for part, source in zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True):
            self.env[part] = self.env[source]
        for part in traced.graph.find_nodes(op="get_attr"):
            self.env[part] = relax.const(tensor_attribute(traced, str(part.target)).numpy())
        for part in (n for n in traced.graph.nodes if n.op == "call_function"):
            if not self._converts(part.target):
                what = f"operator {node.target} has no TVM lowering, as {part.target} has none"
                raise CompileError(what, where=where(node))
            self.env[part] = cast("relax.Expr", self._emit(part))
        return self.env[output_nodes(traced.graph)[0]]

    def stock(self, node: fx.Node) -> relax.Expr:
        """Return what TVM's own converter makes of the node. What it refuses is told as the model's fault.

        A failed assertion of a converter of this package is a defect, and stays what it is.

        Raises:
            CompileError: the converter refuses the node's arguments.
        """
        try:
            return self.convert_map[_name(node.target)](node)
        except (AssertionError, NotImplementedError, ValueError) as error:
            raise CompileError(f"TVM cannot import {node.target}: {error}", where=where(node)) from error

    def _emit_cond(self, node: fx.Node) -> relax.Var:
        """Emit an `If` whose branches call the branches' functions."""
        condition, true, false, operands = cast("tuple[fx.Node, fx.Node, fx.Node, Sequence[fx.Node]]", node.args)
        arguments = [*(self.env[n] for n in operands), *self.literals]
        # The condition is `replay.all()`: the true branch copies the cache, the false branch computes.
        then, otherwise = (relax.Call(self.env[branch], arguments) for branch in (true, false))
        return self.block_builder.emit(relax.If(self.env[condition], then, otherwise))


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return what PyTorch decomposes, by operator."""
    return dict(default_decompositions().items())


def _name(target: Target) -> str:
    """Return the name by which TVM's importer knows an operator: without its namespace."""
    return target if isinstance(target, str) else target.__name__


def _branch(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    branch = get_attribute(module, str(node.target))
    assert isinstance(branch, fx.GraphModule)
    return branch
