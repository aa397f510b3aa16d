"""Each distinct segment of the decode step as one ONNX function: a layer is exported once, however many there are."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import torch
from onnx import helper
from torch import fx

from fastcar_compile.codegen.onnx.ops import translation_table
from fastcar_compile.codegen.segment import Segment

OPSET = 18
DOMAIN = "fastcar"
"""Of the functions."""

_TALKATIVE = ("torch.onnx._internal.exporter._registration", "onnx_ir.passes.common.initializer_deduplication")


def segment_function(part: Segment, name: str) -> tuple[onnx.FunctionProto, list[onnx.FunctionProto]]:
    """Return the segment as the function `DOMAIN.name`, and the functions that it calls.

    int8 parameters are uint8 with zero point 128 there, as `ops.linear_w8a8` takes them.

    Raises:
        torch.onnx.errors.OnnxExporterError: an operator has no translation.
    """
    module = part.copy()
    exported = torch.export.export(module, tuple(_example(n) for n in part.inputs), strict=False)
    with quiet_exporter():
        program = torch.onnx.export(
            exported, dynamo=True, custom_translation_table=translation_table(), opset_version=OPSET, verbose=False
        )
    assert program is not None
    proto = program.model_proto
    strip(proto)
    return _function(proto, name, [n.name for n in module.graph.nodes if n.op == "placeholder"]), list(proto.functions)


def _example(node: fx.Node) -> torch.Tensor:
    """Return zeros that nothing writes to, so that they take no memory: the export reads shape and dtype only."""
    val = node.meta["val"]
    dtype = torch.uint8 if node.op == "get_attr" and val.dtype == torch.int8 else val.dtype
    return torch.zeros(tuple(val.shape), dtype=dtype)


def _function(proto: onnx.ModelProto, name: str, inputs: list[str]) -> onnx.FunctionProto:
    """Return the graph as a function: constants replace initialisers, an identity separates an input from an output."""
    graph = proto.graph
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in graph.initializer]
    nodes += graph.node
    outputs = []
    for value in graph.output:
        outputs.append(value.name)
        if value.name in inputs or value.name in outputs[:-1]:
            outputs[-1] = f"{value.name}_returned_{len(outputs)}"
            nodes.append(helper.make_node("Identity", [value.name], [outputs[-1]]))
    return helper.make_function(DOMAIN, name, inputs, outputs, nodes, list(proto.opset_import))


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
