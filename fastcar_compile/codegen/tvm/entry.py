"""The module's entry: a function that calls prologue, layers and epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from tvm import relax
from tvm.ir import GlobalVar, StringImm
from tvm.tirx import IntImm

from fastcar_compile.codegen.segment import Segment
from fastcar_compile.codegen.tvm.relax_api import type_of
from fastcar_compile.ir.query import output_nodes


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


def _identity(node: fx.Node) -> object:
    """Return what a value is known by: a parameter is one value however many nodes read it."""
    return str(node.target) if node.op == "get_attr" else node
