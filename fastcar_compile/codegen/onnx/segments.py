"""Each distinct segment of the decode step as one ONNX function: a layer is exported once, however many there are."""

import dataclasses
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from typing import cast

import onnx
import torch
from google.protobuf.message import Message
from onnx import helper
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from fastcar_compile.artifact.sections import OnnxSection
from fastcar_compile.codegen.onnx.translate import translate
from fastcar_compile.codegen.segment import Segment
from fastcar_compile.ir.layers import layer_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of, source_of
from fastcar_compile.ir.query import graph_module, output_nodes
from fastcar_compile.ir.types import DecoderConfig

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
    reads = [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in arguments]
    writes = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in results]
    signature = ExportGraphSignature(reads, writes)
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
    made.meta = {"val": node.meta["val"], "nn_module_stack": {}, "stack_trace": f"operator {place}"}
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


# Names and origins in the ONNX model, as Netron shows them: module path, source line, pass.
#
# The exporter copies to each ONNX node the stack trace of its operator. Instead of a trace, operators have a mark,
# which says their place in the part or branch. A node that finds no operator keeps the exporter's name.


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
    own, names, layer = module_path(part), list[str](), layer_of(part.nodes[0])
    for node in part.inputs:
        # Layers share a function, so the names inside of it leave out the layer.
        path = str(node.target) if node.op == "get_attr" else node.name.removesuffix(f"_{layer}")
        name = _NO_IDENTIFIER.sub("_", path.removeprefix(f"{own}.") if own else path)
        # Other inputs may end in a number, too.
        numbered = (name if i == 1 else f"{name}_{i}" for i in count(1))
        names.append(next(other for other in numbered if other not in names))
    return names


def call_origin(node: onnx.NodeProto, part: Segment, fallback: str) -> None:
    """Name the call of a segment by its module, and note its layer and the passes that made operators of it."""
    layer, nodes = layer_of(part.nodes[0]), part.nodes
    node.name = module_path(part) if layer is not None else fallback
    passes = sorted({made for n in nodes if (made := str(n.meta.get("made_by", "")))})
    place = "outside of the layers" if layer is None else f"layer {layer}"
    node.doc_string = f"{place}: {len(nodes)} operators; passes: {', '.join(passes) or 'none'}"
    _note(node, {"layer": "" if layer is None else str(layer), "made_by": ", ".join(passes)})


def function_origins(function: onnx.FunctionProto, part: Segment) -> None:
    """Name every node of a segment's function, and note source line, module and pass; other notes are dropped."""
    names = _Names(module_path(part))
    origins = [_marked(proto, part.nodes) for proto in function.node]
    for proto, origin in zip(function.node, origins, strict=True):
        # The operators of a branch are numbered by themselves, so their marks are looked up in that branch.
        if origin is None or proto.op_type != "If":
            continue
        branches = [part.branches[a] for a in origin.all_input_nodes if a in part.branches]
        found = {a.name: a.g for a in proto.attribute if a.HasField("g")}
        # In the order of the arguments of `cond`.
        for graph, branch in zip((found["then_branch"], found["else_branch"]), branches, strict=True):
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


def _marked(proto: onnx.NodeProto, operators: Sequence[fx.Node]) -> fx.Node | None:
    """Return the operator whose mark a node has."""
    found = _MARK.search(next((p.value for p in proto.metadata_props if p.key == _TRACE), ""))
    return operators[int(found[1])] if found else None


def _note(proto: onnx.NodeProto, notes: Mapping[str, str]) -> None:
    for key, value in notes.items():
        if value:
            proto.metadata_props.add(key=key, value=value)
