"""Each distinct segment of the decode step as one ONNX function: a layer is exported once, however many there are."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import onnx
import torch
from google.protobuf.message import Message
from onnx import helper
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram, graph_signature

from fastcar_compile.codegen.onnx.names import function_origins, input_names, mark
from fastcar_compile.codegen.onnx.translate import translate
from fastcar_compile.codegen.segment import Segment
from fastcar_compile.ir.query import graph_module, output_nodes

DOMAIN = "fastcar"
"""ONNX domain of the functions."""

_TALKATIVE = ("torch.onnx._internal.exporter._registration", "onnx_ir.passes.common.initializer_deduplication")


def segment_functions(parts: Mapping[str, Segment]) -> list[onnx.FunctionProto]:
    """Return each segment as the function `DOMAIN.name`, and before them the functions that they call.

    One call of the exporter takes all of them: most of its time does not depend on what it exports. int8 parameters are
    uint8 with zero point 128 there, as `ops.linear_w8a8` takes them.

    Args:
        parts: name of the function -> its segment.

    Raises:
        torch.onnx.errors.OnnxExporterError: an operator has no translation.
    """
    exported, inputs = _joined(parts)
    # The graph is only traced again where an operator has to be decomposed.
    with quiet_exporter():
        proto = translate(exported, lambda: _traced(exported.graph_module))
    functions, first = [], 0
    for name, part in parts.items():
        # The exporter renames values, so results are found by their place.
        outputs = [value.name for value in proto.graph.output[first : first + len(part.outputs)]]
        function = _function(proto, name, inputs[name], outputs)
        function_origins(function, part)
        functions.append(function)
        first += len(part.outputs)
    strip(proto)
    return [*proto.functions, *functions]


def _joined(parts: Mapping[str, Segment]) -> tuple[ExportedProgram, dict[str, list[str]]]:
    """Return one program of every segment, on inputs of its own, and the names of these inputs by segment.

    The segments' values are known, so nothing has to be traced.
    """
    graph, root = fx.Graph(), torch.nn.Module()
    inputs = {name: [f"{name}_{readable}" for readable in input_names(part)] for name, part in parts.items()}
    # fx may name an input in another way than asked for: without capital letters, for one.
    places = {name: [graph.placeholder(i) for i in names] for name, names in inputs.items()}
    inputs = {name: [place.name for place in made] for name, made in places.items()}
    results: list[fx.Node] = []
    for name, part in parts.items():
        for place, node in zip(places[name], part.inputs, strict=True):
            # An int8 parameter is uint8 in the model, and `MatMulInteger` of the definitions takes it so.
            place.meta["val"] = _stored(node)
        results += _inline(graph, root, part.copy(), places[name], name)
    graph.output(tuple(results))
    arguments = tuple(n for names in places.values() for n in names)
    signature = graph_signature.ExportGraphSignature(
        [
            graph_signature.InputSpec(
                graph_signature.InputKind.USER_INPUT, graph_signature.TensorArgument(n.name), None
            )
            for n in arguments
        ],
        [
            graph_signature.OutputSpec(
                graph_signature.OutputKind.USER_OUTPUT, graph_signature.TensorArgument(n.name), None
            )
            for n in results
        ],
    )
    return ExportedProgram(graph_module(root, graph), graph, signature, {}, {}, []), inputs


def _traced(module: fx.GraphModule) -> ExportedProgram:
    """Return the graph as torch.export traces it, on zeros that nothing writes to, so that they take no memory."""
    values = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    examples = tuple(torch.zeros(tuple(v.shape), dtype=v.dtype) for v in values)
    return torch.export.export(module, examples, strict=False)


def _inline(
    graph: fx.Graph, root: torch.nn.Module, module: fx.GraphModule, places: Sequence[fx.Node], prefix: str
) -> Sequence[fx.Node]:
    """Add a segment's nodes and its branches to a graph; return the segment's results."""
    values = dict(zip(module.graph.find_nodes(op="placeholder"), places, strict=True))
    for node in module.graph.find_nodes(op="get_attr"):
        # Branches of all segments are in one module, so the segment's name keeps them apart.
        target = f"{prefix}_{node.target}"
        root.add_module(target, _branch(module.get_submodule(str(node.target))))
        values[node] = graph.get_attr(target)
    operators = [n for n in module.graph.nodes if n.op == "call_function"]
    for i, node in enumerate(operators):
        values[node] = _operator(graph, node, values, i)
    return [values[n] for n in output_nodes(module.graph)]


def _branch(module: torch.nn.Module) -> fx.GraphModule:
    """Return a branch with marked operators."""
    assert isinstance(module, fx.GraphModule)
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(module.graph.nodes):
        if node.op == "placeholder":
            values[node] = graph.placeholder(node.name)
            values[node].meta["val"] = node.meta["val"]
        elif node.op == "call_function":
            values[node] = _operator(graph, node, values, i)
    graph.output(tuple(values[n] for n in output_nodes(module.graph)))
    return graph_module(torch.nn.Module(), graph)


def _operator(graph: fx.Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node], place: int) -> fx.Node:
    """Add an operator, named after what it does and marked with its place."""
    target = cast("OpOverload | Callable[..., object]", node.target)
    name = target.overloadpacket.__name__ if isinstance(target, OpOverload) else target.__name__
    args, kwargs = fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)
    made = graph.create_node("call_function", target, args, kwargs, name=name)
    # The exporter copies the stack trace to every ONNX node that it makes: the mark leads back to the operator.
    made.meta = {"val": node.meta["val"], "nn_module_stack": {}, **mark(place)}
    return made


def _stored(node: fx.Node) -> torch.Tensor:
    """Return the value of an input as the model has it: an int8 parameter is uint8 there."""
    value = node.meta["val"]
    return value.to(torch.uint8) if node.op == "get_attr" and value.dtype == torch.int8 else value


def _function(proto: onnx.ModelProto, name: str, inputs: list[str], outputs: list[str]) -> onnx.FunctionProto:
    """Return what computes `outputs` as a function.

    Constants replace initialisers. An identity separates an input from an output.
    """
    needed = set(outputs)
    body: list[onnx.NodeProto] = []
    # From the results back: what no result of this segment needs is another segment's.
    for node in reversed(proto.graph.node):
        if needed.intersection(node.output):
            body.append(node)
            needed |= _read(node)
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in proto.graph.initializer if t.name in needed]
    nodes += reversed(body)
    returned: list[str] = []
    for value in outputs:
        # A function may not return its input, or one value twice.
        if value in inputs or value in returned:
            again = f"{value}_returned_{len(returned) + 1}"
            nodes.append(helper.make_node("Identity", [value], [again]))
            value = again
        returned.append(value)
    return helper.make_function(DOMAIN, name, inputs, returned, nodes, list(proto.opset_import))


def _read(node: onnx.NodeProto) -> set[str]:
    """Return the values that a node reads, those that its branches take from outside among them."""
    graphs = (graph for attribute in node.attribute if attribute.HasField("g") for graph in _graphs(attribute.g))
    return {name for graph in graphs for inner in graph.node for name in inner.input}.union(
        node.input, *([v.name for v in g.output] for a in node.attribute if a.HasField("g") for g in _graphs(a.g))
    )


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's notes on torchvision, on constants that it keeps, and on its own deprecated calls."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def strip(proto: Message) -> None:
    """Drop what the exporter notes about this machine: source paths, and names of its own objects."""
    for name in ("doc_string", "metadata_props"):
        if name in proto.DESCRIPTOR.fields_by_name:
            proto.ClearField(name)
    for field, value in proto.ListFields():
        if field.message_type is not None:
            for inner in [value] if isinstance(value, Message) else value:
                strip(inner)
