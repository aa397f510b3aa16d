"""What a converter emits for one fx node: kernels, kernels in place, and views."""

from __future__ import annotations

from typing import Any

import tvm
from torch import fx
from tvm import relax
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels.registry import dispatch


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's tensor."""
    return tuple(int(d) for d in node.meta["val"].shape)


def dtype_of(node: fx.Node) -> str:
    """TVM's name of the type of a node's tensor."""
    return str(node.meta["val"].dtype).removeprefix("torch.")


_RESHAPE = tvm.ir.Op.get("relax.reshape")


class Emitter:
    """Emits kernels for one fx node."""

    def __init__(self, node: fx.Node, importer: Any) -> None:
        self.node, self.importer, self.builder = node, importer, importer.block_builder
        self.args = importer.retrieve_args(node)

    def chosen(self, kind: str, *options: Any) -> PrimFunc:
        """The kernel of that kind for the instruction set that is lowered for."""
        return dispatch(self.importer.isa, kind, *options)

    def kernel(self, function: PrimFunc, args: list[Any], shape: tuple[int, ...], dtype: str) -> relax.Var:
        """A call of the kernel, whose last argument is the result of this shape."""
        target = self.builder.add_func(function, function.__name__)
        return self.builder.emit(relax.call_tir(target, args, relax.TensorType(shape, dtype)))

    def kernels(self, function: PrimFunc, args: list[Any], outs: list[tuple[tuple[int, ...], str]]) -> relax.Var:
        """The same with several results."""
        target = self.builder.add_func(function, function.__name__)
        return self.builder.emit(relax.call_tir(target, args, [relax.TensorType(s, d) for s, d in outs]))

    def in_place(self, function: PrimFunc, args: list[Any]) -> relax.Var:
        """The kernel writes into its first argument, which is also the result: no cache is copied."""
        target = self.builder.add_func(function, function.__name__)
        out = relax.TensorType(shape_of(self.node), dtype_of(self.node))
        return self.builder.emit(relax.op.call_tir_inplace(target, args, [0], out))

    def reshape(self, value: relax.Expr, shape: tuple[int, ...]) -> relax.Var:
        """A reshape of a reshape is one: TVM would fuse two into a kernel that copies."""
        bound = self.builder.lookup_binding(value) if isinstance(value, relax.Var) else None
        while isinstance(bound, relax.Call) and bound.op == _RESHAPE:
            value = bound.args[0]
            bound = self.builder.lookup_binding(value) if isinstance(value, relax.Var) else None
        return self.builder.emit(relax.op.reshape(value, shape))
