"""Each distinct segment of the decode step as one ONNX function: a layer is exported once, however many there are."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import getitem

import onnx
import torch
from onnx import helper
from torch import fx

from fastcar_compile.codegen.onnx.names import function_origins, input_names
from fastcar_compile.codegen.onnx.translate import translate
from fastcar_compile.codegen.segment import Segment

DOMAIN = "fastcar"
"""Of the functions."""

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
    joined, inputs = _joined(parts)
    examples = tuple(_example(node) for part in parts.values() for node in part.inputs)
    exported = torch.export.export(joined, examples, strict=False)
    with quiet_exporter():
        proto = translate(exported)
    functions, first = [], 0
    for name, part in parts.items():
        outputs = [value.name for value in proto.graph.output[first : first + len(part.outputs)]]
        function = _function(proto, name, inputs[name], outputs)
        function_origins(function, part)
        functions.append(function)
        first += len(part.outputs)
    strip(proto)
    return [*proto.functions, *functions]


def _joined(parts: Mapping[str, Segment]) -> tuple[fx.GraphModule, dict[str, list[str]]]:
    """Return one graph that calls every segment on inputs of its own, and the names of these inputs by segment."""
    graph = fx.Graph()
    modules: dict[str, fx.GraphModule] = {name: part.copy() for name, part in parts.items()}
    inputs: dict[str, list[str]] = {}
    for name in modules:
        inputs[name] = [f"{name}_{readable}" for readable in input_names(parts[name])]
    places = {name: [graph.placeholder(i) for i in names] for name, names in inputs.items()}
    calls = {name: graph.call_module(name, tuple(places[name])) for name in modules}
    counts = {name: len(part.outputs) for name, part in parts.items()}
    graph.output(tuple(graph.call_function(getitem, (calls[name], i)) for name in modules for i in range(counts[name])))
    return fx.GraphModule(torch.nn.ModuleDict(modules), graph), inputs


def _example(node: fx.Node) -> torch.Tensor:
    """Return zeros that nothing writes to, so that they take no memory: the export reads shape and dtype only."""
    val = node.meta["val"]
    dtype = torch.uint8 if node.op == "get_attr" and val.dtype == torch.int8 else val.dtype
    return torch.zeros(tuple(val.shape), dtype=dtype)


def _function(proto: onnx.ModelProto, name: str, inputs: list[str], outputs: list[str]) -> onnx.FunctionProto:
    """Return what computes `outputs` as a function.

    Constants replace initialisers. An identity separates an input from an output.
    """
    needed = set(outputs)
    body: list[onnx.NodeProto] = []
    for node in reversed(proto.graph.node):
        if needed.intersection(node.output):
            body.append(node)
            needed |= _read(node)
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in proto.graph.initializer if t.name in needed]
    nodes += reversed(body)
    returned: list[str] = []
    for value in outputs:
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


def strip(proto: onnx.ModelProto) -> None:
    """Drop what the exporter notes about this machine: source paths, and names of its own objects."""
    del proto.metadata_props[:]
    for graph in _graphs(proto.graph):
        del graph.metadata_props[:]
        graph.doc_string = ""
        for item in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            item.doc_string = ""
            del item.metadata_props[:]
    for function in proto.functions:
        function.doc_string = ""
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]
