"""Names and origins in the ONNX model, as Netron shows them: module path, source line, pass.

The exporter copies to each ONNX node the stack trace of its operator. Instead of a trace, operators have `mark` there,
which says their place in the part or branch. A node that finds no operator keeps the exporter's name.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import onnx
from onnx import helper
from torch import fx

from fastcar_compile.artifact.sections import OnnxSection
from fastcar_compile.codegen.segment import Segment
from fastcar_compile.ir.layers import layer_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of, source_of
from fastcar_compile.ir.types import DecoderConfig

_TRACE = "pkg.torch.onnx.stack_trace"
_MARK = re.compile(r"operator (\d+)")
_NO_IDENTIFIER = re.compile(r"\W+", re.ASCII)

MODEL = "the model"
"""Made by: an operator that no pass made."""


PRODUCER = "fastcar_compile"

_VALUES = {
    "tokens": "token ids of this step, one per row",
    "inputs_embeds": "embeddings of this step, one per row",
    "position": "position of the token in the sequence",
    "context": "what cross-attention reads, such as text embeddings",
    "context_mask": "true where a token of the context is seen",
    "step": "number of the decode forward, from 0",
    "thresholds": "replay threshold of every layer",
    "logits": "logits, or hidden states of a decoder without a head",
    "decisions": "true where the MLP of the layer was replayed for the row",
    "scores": "score of the gate, by layer and row",
}
"""What the inputs and outputs that are no state mean."""


_KINDS = {
    "decoder": "One decode step of an autoregressive video decoder. A state goes in by its name and comes out as "
    "NAME_out.",
    "context": "What an autoregressive video decoder reads of a context, once per video. Its results are inputs of the "
    "decode step.",
}
"""What a model is."""


def model_notes(model: onnx.ModelProto, kind: str, config: DecoderConfig) -> None:
    """Note what the model of that kind is and its sizes, which a reader of the file alone would not know."""
    model.doc_string = _KINDS[kind]
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
    """Return key of a segment -> name of its function: prologue, layer (layer_3: first of another kind), epilogue."""
    names: dict[str, str] = {}
    for part in parts:
        layer = layer_of(part.nodes[0])
        if part.key in names:
            continue
        if layer is None:
            names[part.key] = "epilogue" if names else "prologue"
        else:
            names[part.key] = "layer" if "layer" not in names.values() else f"layer_{layer}"
    return names


def module_path(part: Segment) -> str:
    """Return the module that all operators of a segment with a module are inside of; "" where there is none."""
    paths = [path.split(".") for n in part.nodes if (path := module_path_of(n))]
    common = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in common)


def input_names(part: Segment) -> list[str]:
    """Return an identifier for each input of a segment: its parameter inside of the module, or its node."""
    own, taken, names = module_path(part), Counter[str](), []
    for node in part.inputs:
        # Layers share a function, so the names inside of it leave out the layer.
        path = str(node.target) if node.op == "get_attr" else _without_layer(node, part)
        name = _NO_IDENTIFIER.sub("_", path.removeprefix(f"{own}.") if own else path)
        taken[name] += 1
        names.append(name if taken[name] == 1 else f"{name}_{taken[name]}")
    return names


def _without_layer(node: fx.Node, part: Segment) -> str:
    """Return a node's name; a state's without the number of its layer, since layers share a function."""
    layer = layer_of(part.nodes[0])
    return node.name if layer is None else node.name.removesuffix(f"_{layer}")


def call_origin(node: onnx.NodeProto, part: Segment, fallback: str) -> None:
    """Name the call of a segment by its module, and note its layer and the passes that made operators of it."""
    layer, nodes = layer_of(part.nodes[0]), part.nodes
    node.name = module_path(part) if layer is not None else fallback
    passes = sorted({made for n in nodes if (made := str(n.meta.get("made_by", "")))})
    place = "outside of the layers" if layer is None else f"layer {layer}"
    node.doc_string = f"{place}: {len(nodes)} operators; passes: {', '.join(passes) or 'none'}"
    _note(node, {"layer": "" if layer is None else str(layer), "made_by": ", ".join(passes)})


def mark(number: int) -> dict[str, str]:
    """Return the metadata that lead from the nodes of an ONNX model to the operator of that place."""
    return {"stack_trace": f"operator {number}"}


def function_origins(function: onnx.FunctionProto, part: Segment) -> None:
    """Name every node of a segment's function, and note source line, module and pass; other notes are dropped."""
    names = _Names(module_path(part))
    origins = [_marked(proto, part.nodes) for proto in function.node]
    for proto, origin in zip(function.node, origins, strict=True):
        # The operators of a branch are numbered by themselves, so their marks are looked up in that branch.
        if origin is None or proto.op_type != "If":
            continue
        branches = [part.branches[a] for a in origin.all_input_nodes if a in part.branches]
        for graph, branch in zip(_then_else(proto), branches, strict=True):
            operators = list(branch.graph.nodes)
            names.note(list(graph.node), [_marked(inner, operators) for inner in graph.node])
    names.note(list(function.node), origins)


class _Names:
    """Names inside of one function; no two are equal. own: the module that the function is of."""

    def __init__(self, own: str) -> None:
        self.own, self.taken = own, Counter[str]()

    def note(self, protos: Sequence[onnx.NodeProto], origins: Sequence[fx.Node | None]) -> None:
        """Name nodes and note where they come from; the last node of an operator has the operator's own name."""
        # An operator may become several ONNX nodes. The last of them yields its value, and gets its name.
        last = {origin: number for number, origin in enumerate(origins)}
        for number, (proto, origin) in enumerate(zip(protos, origins, strict=True)):
            clear(proto)
            if origin is not None:
                self._note(proto, origin, whole=last[origin] == number)

    def _note(self, proto: onnx.NodeProto, origin: fx.Node, *, whole: bool) -> None:
        """Name a node `module/operator`, or `module/operator/Mul` where it is a part of the operator."""
        path, made_by = module_path_of(origin), str(origin.meta.get("made_by", ""))
        inside = path.removeprefix(self.own).removeprefix(".") if self.own else path
        name = "/".join(part for part in (inside, _stem(origin), "" if whole else proto.op_type) if part)
        self.taken[name] += 1
        proto.name = name if self.taken[name] == 1 else f"{name}_{self.taken[name]}"
        source = source_of(origin)
        proto.doc_string = f"{source or 'no line of the model'}, by {made_by or MODEL}"
        _note(proto, {"source": source, "module": inside, "made_by": made_by})


def clear(proto: onnx.NodeProto) -> None:
    """Drop what the exporter notes with a node and with its branches: paths of this machine, its own objects."""
    proto.doc_string = ""
    del proto.metadata_props[:]
    for attribute in proto.attribute:
        if attribute.HasField("g"):
            attribute.g.doc_string = ""
            del attribute.g.metadata_props[:]


def _stem(operator: fx.Node) -> str:
    """Return an operator's own name: `linear` of `aten.linear.default`."""
    parts = str(operator.target).split(".")
    return parts[-2] if len(parts) > 2 else parts[-1]


def _then_else(proto: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the branches of an `If` in the order of `cond`'s arguments."""
    found = {a.name: a.g for a in proto.attribute if a.HasField("g")}
    return [found["then_branch"], found["else_branch"]]


def _exporter_note(proto: onnx.NodeProto, key: str) -> str:
    return next((p.value for p in proto.metadata_props if p.key == key), "")


def _marked(proto: onnx.NodeProto, operators: Sequence[fx.Node]) -> fx.Node | None:
    """Return the operator whose mark a node has."""
    found = _MARK.search(_exporter_note(proto, _TRACE))
    return operators[int(found[1])] if found else None


def _note(proto: onnx.NodeProto, notes: Mapping[str, str]) -> None:
    for key, value in notes.items():
        if value:
            proto.metadata_props.add(key=key, value=value)
