"""The rewritten decode step as an ONNX model: `If` around every replayable MLP, state as named inputs and outputs.

The graph calls one function per segment; layers of equal structure share theirs. Weights are in the file, or they are
external data: the bytes of the artifact's own weight files, so that nothing is stored twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor, fx

from fastcar_compile.artifact.layout import ONNX, ONNX_CONTEXT
from fastcar_compile.artifact.manifest import producer_versions
from fastcar_compile.artifact.sections import OnnxSection
from fastcar_compile.codegen.emit import EmitContext
from fastcar_compile.codegen.onnx import segments
from fastcar_compile.codegen.onnx.linear import ZERO_POINT
from fastcar_compile.codegen.onnx.segments import DOMAIN, PRODUCER
from fastcar_compile.codegen.onnx.translate import OPSET
from fastcar_compile.codegen.segment import Segment, segment
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import output_nodes, tensor_attributes
from fastcar_compile.ir.tensor_files import TensorPlacement
from fastcar_compile.support.packages import needs

IR_VERSION = 10


def export_onnx(
    program: DecoderProgram, path: Path, places: Mapping[str, TensorPlacement] | None = None, *, context: bool = False
) -> None:
    """Write the decode step as ONNX, checked by onnx.checker. Same program, same bytes.

    Args:
        program: the rewritten program. path: the .onnx file.
        places: where each parameter's bytes are, relative to the folder of `path`; None: write them into the file,
            which must then stay below protobuf's 2 GiB.
        context: write the context graph instead.

    Raises:
        CompileError: operators that have no ONNX translation.
    """
    module, outputs = program.graph_module, program.outputs
    if context and program.context is not None:
        module, outputs = program.context, program.context_outputs
    builder = _OnnxBuilder(program, module, outputs, places)
    try:
        proto = builder.model()
    except torch.onnx.errors.OnnxExporterError as error:
        raise _export_error(module, error) from error
    onnx.save(proto, str(path))
    onnx.checker.check_model(str(path), full_check=True)


@dataclass
class _OnnxBuilder:
    """Collects the parts of a model: of a graph of the program; `places` as for `export_onnx`."""

    program: DecoderProgram
    module: fx.GraphModule
    outputs: Sequence[str]
    places: Mapping[str, TensorPlacement] | None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    values: dict[Any, str] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        """The whole model."""
        module, params = self.module, self.program.params
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        taken = {str(n.target) for n in placeholders}
        # ONNX names its values once for the whole graph. A state that goes in and comes out has two names.
        names = [OnnxSection.output_name(n) if n in taken else n for n in self.outputs]
        returned = list(zip(names, output_nodes(module.graph), strict=True))
        self.values |= {n: str(n.target) for n in placeholders}
        for name, node in returned:
            if node.op == "call_function":
                # An operator's value takes the name of the first output
                # that it is. A second output of it becomes an Identity.
                self.values.setdefault(node, name)
        read = tensor_attributes(module)
        # The parameters of the program are those of all its graphs; the file has those that this graph reads.
        for name in (name for name in params if name in read):
            self._parameter(name, params.spec(name))
        functions = self._calls(segment(module))
        for name, node in returned:
            if self._value(node) != name:
                self.nodes.append(helper.make_node("Identity", [self._value(node)], [name]))
        notes = segments.value_notes(self.program)
        inputs = [_info(str(n.target), n, notes) for n in placeholders]
        outputs = [_info(name, node, notes) for name, node in returned]
        kind = "context" if module is self.program.context else "decoder"
        graph = helper.make_graph(self.nodes, kind, inputs, outputs, [*self.initializers.values()])
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        # Functions of onnxscript may stay in the model, and bring domains of their own.
        known = {o.domain for o in opsets}
        domains = {o.domain: o for f in functions for o in f.opset_import if o.domain not in known}
        opsets += [domains[d] for d in sorted(domains)]
        producer = {"producer_name": PRODUCER, "producer_version": producer_versions()[PRODUCER]}
        model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=IR_VERSION, **producer)
        segments.model_notes(model, kind, self.program.config)
        return model

    def _calls(self, parts: Sequence[Segment]) -> list[onnx.FunctionProto]:
        """Add one node per segment; return the functions. Equal segments call one function."""
        # Reversed, so that the first segment of each kind stays in the dictionary.
        distinct = {part.key: part for part in reversed(parts)}
        names = segments.function_names(parts)
        for part in parts:
            for node in part.outputs:
                self.values.setdefault(node, f"value.{node.name}")
            inputs, outputs = ([self._value(n) for n in nodes] for nodes in (part.inputs, part.outputs))
            call = helper.make_node(names[part.key], inputs, outputs, domain=DOMAIN)
            segments.call_origin(call, part, names[part.key])
            self.nodes.append(call)
        return segments.segment_functions({name: distinct[key] for key, name in names.items()})

    def _value(self, node: fx.Node) -> str:
        return str(node.target) if node.op == "get_attr" else self.values[node]

    def _parameter(self, name: str, spec: Tensor) -> None:
        """An initialiser; int8 becomes uint8 with zero point 128."""
        if self.places is None or not spec.numel():
            value = self.program.params[name].detach().cpu().contiguous()
            if value.dtype == torch.int8:
                value = value.view(torch.uint8) ^ ZERO_POINT  # the byte of w with its top bit flipped is w + 128
            self.initializers[name] = _inline(name, value)
            return
        # The weight file is shared with the other backends, so its int8 bytes stay as they are.
        signed = spec.dtype == torch.int8
        stored = f"{name}.stored" if signed else name
        kind = TensorProto.UINT8 if signed else from_torch_dtype(spec.dtype)
        place, external = self.places[name], TensorProto.EXTERNAL
        tensor = TensorProto(name=stored, data_type=kind, dims=spec.shape, data_location=external)
        for key, value in (("location", place.file), ("offset", place.offset), ("length", place.length)):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers[stored] = tensor
        if signed:
            # As above; onnxruntime folds this when it loads the model.
            top_bit = numpy_helper.from_array(np.array(ZERO_POINT, np.uint8), "top_bit")
            self.initializers.setdefault(top_bit.name, top_bit)
            self.nodes.append(helper.make_node("BitwiseXor", [stored, top_bit.name], [name]))


def _inline(name: str, value: Tensor) -> TensorProto:
    # By way of bytes: numpy has no bfloat16.
    raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return helper.make_tensor(name, from_torch_dtype(value.dtype), tuple(value.shape), raw, raw=True)


def _info(name: str, node: fx.Node, notes: Mapping[str, str]) -> onnx.ValueInfoProto:
    val = node.meta["val"]
    return helper.make_tensor_value_info(
        name, from_torch_dtype(val.dtype), [int(d) for d in val.shape], notes.get(name, "")
    )


def _export_error(module: fx.GraphModule, error: BaseException) -> CompileError:
    """Return the innermost cause as one line, and the first node whose operator it names."""
    # The exporter wraps the error of an operator several times. The innermost one names the operator.
    while error.__cause__ is not None:
        error = error.__cause__
    text = (str(error) or type(error).__name__).splitlines()[0]
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function" and repr(n.target) in text]
    place = where(nodes[0]) if nodes else "the decode step"
    return CompileError(f"the graph cannot be exported to ONNX: {text}", where=place)


class OnnxEmitter:
    """Writes the decode step as one ONNX model, and with cross-attention the context graph as a second one."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> OnnxSection | None:
        """Write the model; see Emitter.emit. Exact numerics have none: onnxruntime rounds linears in its own way."""
        if context.plan.config.numerics == "exact":
            return None
        context.say("exporting to ONNX")
        with needs("compile"):  # not imported before, because builds without a model need none of its packages
            pass

        export_onnx(program, context.writer.file(ONNX), context.places)
        if program.context is None:
            return OnnxSection(model=ONNX)
        export_onnx(program, context.writer.file(ONNX_CONTEXT), context.places, context=True)
        return OnnxSection(model=ONNX, context=ONNX_CONTEXT)
