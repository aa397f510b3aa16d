"""Names and origins in the ONNX model, as Netron shows them: module path, source line, pass.

The exporter notes the line of generated code that each node comes from. That line assigns `n_9`, the part's operator 9,
or `b_3`, operator 3 of a branch. So every node finds its operator; one that finds none keeps the exporter's name.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import helper
from torch import fx

from fastcar_compile.artifact.sections import DecoderConfig, OnnxSection
from fastcar_compile.codegen.segment import Segment
from fastcar_compile.ir.layers import layer_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of, source_of

_TRACE = "pkg.torch.onnx.stack_trace"
_ASSIGNED = re.compile(r"^\s*[nb]_(\d+)(?:, \w+)* = ", re.MULTILINE)
_NO_IDENTIFIER = re.compile(r"\W+")

MODEL = "the model"
"""Made by: an operator that no pass made."""


PRODUCER = "fastcar_compile"

_VALUES = {
    "tokens": "token ids of this step, one per row",
    "inputs_embeds": "embeddings of this step, one per row",
    "position": "position of the token in the sequence",
    "step": "number of the decode forward, from 0",
    "thresholds": "replay threshold of every layer",
    "logits": "logits, or hidden states of a decoder without a head",
    "decisions": "true where the MLP of the layer was replayed for the row",
    "scores": "score of the gate, by layer and row",
}
"""What the inputs and outputs that are no state mean."""


def model_notes(model: onnx.ModelProto, config: DecoderConfig) -> None:
    """Note what the model is and its sizes, which a reader of the file alone would not know."""
    model.doc_string = (
        "One decode step of an autoregressive video decoder. A state goes in by its name and comes out as NAME_out."
    )
    fields = dataclasses.asdict(config)
    helper.set_model_props(model, {k: str(v) for k, v in fields.items() if isinstance(v, int) and v is not None})


def value_notes(program: DecoderProgram) -> dict[str, str]:
    """Return the note of every input and output of the graph, by name."""
    notes = dict(_VALUES)
    for state in program.state:
        text = f"state: {str(state.role).replace('_', ' ')} of layer {state.layer}"
        notes[state.name] = text
        notes[OnnxSection.output_name(state.name)] = f"{text}, updated"
    return notes


def function_names(parts: Iterable[Segment]) -> dict[str, str]:
    """Return key of a segment -> name of its function: prologue, layer, layer_3 (the first of another kind), epilogue."""
    names: dict[str, str] = {}
    for part in parts:
        layer = layer_of(part.part.nodes[0])
        if part.key in names:
            continue
        if layer is None:
            names[part.key] = "epilogue" if names else "prologue"
        else:
            names[part.key] = "layer" if "layer" not in names.values() else f"layer_{layer}"
    return names


def module_path(part: Segment) -> str:
    """Return the module that all operators of a segment with a module are inside of; "" where there is none."""
    paths = [path.split(".") for n in part.part.nodes if (path := module_path_of(n))]
    common: list[str] = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


def input_names(part: Segment) -> list[str]:
    """Return an identifier for each input of a segment: its parameter inside of the module, or its node."""
    own, taken, names = module_path(part), Counter[str](), []
    for node in part.inputs:
        path = str(node.target) if node.op == "get_attr" else _without_layer(node, part)
        name = _NO_IDENTIFIER.sub("_", path.removeprefix(f"{own}.") if own else path)
        taken[name] += 1
        names.append(name if taken[name] == 1 else f"{name}_{taken[name]}")
    return names


def _without_layer(node: fx.Node, part: Segment) -> str:
    """Return a node's name; a state's without the number of its layer, since layers share a function."""
    layer = layer_of(part.part.nodes[0])
    return node.name if layer is None else node.name.removesuffix(f"_{layer}")


def call_origin(node: onnx.NodeProto, part: Segment, fallback: str) -> None:
    """Name the call of a segment by its module, and note its layer and the passes that made operators of it."""
    layer, nodes = layer_of(part.part.nodes[0]), part.part.nodes
    node.name = module_path(part) if layer is not None else fallback
    passes = sorted({made for n in nodes if (made := str(n.meta.get("made_by", "")))})
    place = "outside of the layers" if layer is None else f"layer {layer}"
    node.doc_string = f"{place}: {len(nodes)} operators; passes: {', '.join(passes) or 'none'}"
    _note(node, {"layer": "" if layer is None else str(layer), "made_by": ", ".join(passes)})


def function_origins(function: onnx.FunctionProto, part: Segment) -> None:
    """Name every node of a segment's function, and note source line, module and pass; other notes are dropped."""
    _Origins(module_path(part)).nodes(function.node, part.part.nodes, part.part.branches)


class _Origins:
    """Names inside of one function; no two are equal."""

    def __init__(self, own: str) -> None:
        self.own, self.taken = own, Counter[str]()

    def nodes(
        self, protos: Iterable[onnx.NodeProto], operators: Sequence[fx.Node], branches: Mapping[fx.Node, fx.GraphModule]
    ) -> None:
        """Name nodes that come from these operators."""
        protos = list(protos)
        origins = [_operator(proto, operators) for proto in protos]
        last = {origin: number for number, origin in enumerate(origins) if origin is not None}
        for number, (proto, origin) in enumerate(zip(protos, origins, strict=True)):
            del proto.metadata_props[:]
            proto.doc_string = ""
            if origin is not None:
                self._name(proto, origin, whole=last[origin] == number)
            inner = [branches[a] for a in origin.all_input_nodes if a in branches] if origin is not None else []
            graphs = [a.g for a in proto.attribute if a.HasField("g")]
            for graph in graphs:
                graph.doc_string = ""
                del graph.metadata_props[:]
            for graph, branch in zip(_then_else(proto), inner, strict=False):
                self.nodes(graph.node, list(branch.graph.nodes), {})

    def _name(self, proto: onnx.NodeProto, origin: fx.Node, *, whole: bool) -> None:
        """Name a node `module/operator`, or `module/operator/Mul` where it is a part of the operator."""
        path, made_by = module_path_of(origin), str(origin.meta.get("made_by", ""))
        inside = path.removeprefix(self.own).removeprefix(".") if self.own else path
        operator = str(origin.target).split(".")[-2 if str(origin.target).count(".") > 1 else -1]
        name = "/".join(part for part in (inside, operator, "" if whole else proto.op_type) if part)
        self.taken[name] += 1
        proto.name = name if self.taken[name] == 1 else f"{name}_{self.taken[name]}"
        source = source_of(origin)
        proto.doc_string = f"{source or 'no line of the model'}, by {made_by or MODEL}"
        _note(proto, {"source": source, "module": inside, "made_by": made_by})


def _then_else(proto: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the branches of an `If` in the order of `cond`'s arguments."""
    found = {a.name: a.g for a in proto.attribute if a.HasField("g")}
    return [found[name] for name in ("then_branch", "else_branch") if name in found]


def _operator(proto: onnx.NodeProto, operators: Sequence[fx.Node]) -> fx.Node | None:
    trace = next((p.value for p in proto.metadata_props if p.key == _TRACE), "")
    found = _ASSIGNED.findall(trace)
    return operators[int(found[-1])] if found and int(found[-1]) < len(operators) else None


def _note(proto: onnx.NodeProto, notes: Mapping[str, str]) -> None:
    for key, value in notes.items():
        if value:
            proto.metadata_props.add(key=key, value=value)
