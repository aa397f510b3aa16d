"""The rewritten decode step as an ONNX model: `If` around every replayable MLP, state as named inputs and outputs."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import torch
from torch import fx

from fastcar_compile.codegen.onnx.ops import ZERO_POINT, translation_table
from fastcar_compile.errors import CompileError
from fastcar_compile.ir import DecoderProgram, get_attribute, where

OPSET = 18
EXTERNAL_DATA_FROM = 1 << 30
"""Bytes of parameters from which they go to a file beside the model: protobuf ends at 2 GiB."""


def output_name(name: str) -> str:
    """Name in the ONNX graph of a state's updated value: inputs and outputs share one name space there."""
    return f"{name}_out"


def export_onnx(program: DecoderProgram, path: Path) -> None:
    """Write the decode step as ONNX, checked by onnx.checker; same program, same bytes.

    Args:
        program: the rewritten program. path: the .onnx file; large parameters go to `<path>.data`.

    Raises:
        CompileError: operators that have no ONNX translation.
    """
    module = _with_unsigned_weights(program.graph_module)
    states = set(program.state_names())
    names = [output_name(n) if n in states else n for n in program.outputs]
    exported = torch.export.export(module, tuple(program.example_inputs()), strict=False)
    try:
        with quiet_exporter():
            model = torch.onnx.export(
                exported,
                dynamo=True,
                custom_translation_table=translation_table(),
                input_names=program.inputs,
                output_names=names,
                opset_version=OPSET,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise _export_error(program.graph_module, error) from error
    assert model is not None
    proto = model.model_proto
    _strip(proto)
    large = sum(t.nbytes for t in program.params.values()) >= EXTERNAL_DATA_FROM
    onnx.save(proto, str(path), save_as_external_data=large, location=f"{path.name}.data")
    onnx.checker.check_model(str(path), full_check=True)


def _export_error(module: fx.GraphModule, error: BaseException) -> CompileError:
    """The innermost cause, one line of it, and the first node whose operator it names."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).splitlines()[0]
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function" and repr(n.target) in text]
    place = where(nodes[0]) if nodes else "the decode step"
    return CompileError(f"the graph cannot be exported to ONNX: {text}", where=place)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Without the exporter's notes on torchvision, which no decoder needs, and on its own deprecated calls."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        try:
            yield
        finally:
            logger.setLevel(level)


def _with_unsigned_weights(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose int8 parameters are uint8 with zero point 128, as `ops.linear_w8a8` takes them."""
    clone = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in clone.graph.nodes:
        value = get_attribute(clone, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor) and value.dtype == torch.int8:
            unsigned = (value.to(torch.int16) + ZERO_POINT).to(torch.uint8)
            owner, _, leaf = str(node.target).rpartition(".")
            holder = clone.get_submodule(owner)
            delattr(holder, leaf)
            holder.register_buffer(leaf, unsigned)
    return clone


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _strip(proto: onnx.ModelProto) -> None:
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
