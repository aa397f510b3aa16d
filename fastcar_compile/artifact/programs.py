"""torch.fx graphs as JSON: no pickle and no code is executed; operators resolve in torch.ops only."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fastcar_compile.artifact.layout import GRAPH_AFTER
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection, LayersSection, State
from fastcar_compile.errors import ArtifactError, InternalError, describe_validation
from fastcar_compile.ir.layers import LAYER, LAYER_KEYS, REPLAY, replay_of
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.provenance import is_identifier, is_path, module_path_of, operator_named, source_of
from fastcar_compile.ir.query import branches_of, graph_module
from fastcar_compile.ir.text import NAMESPACES, SPECIAL_OPERATORS, target_name
from fastcar_compile.ir.types import DecoderConfig, ReplayFacts
from fastcar_compile.ir.weights import dtype_name, to_torch, torch_dtype
from fastcar_compile.support import limits
from fastcar_compile.support.values import read_json

Json = dict[str, Any]
_HINT = "compile the model again, or write the file again with `fastcar opt -o NAME.json`"
_REPLAY = TypeAdapter(ReplayFacts)
_KINDS: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple}


def graph_to_json(module: fx.GraphModule) -> Json:
    """Return the graph, its branches, and layer, role and origin of each node. Parameters are kept by name only."""
    return {
        "nodes": [_node_to_json(n) for n in module.graph.nodes],
        "branches": {name: graph_to_json(branch) for name, branch in branches_of(module).items()},
    }


def _target_from(name: str) -> Any:
    if name in SPECIAL_OPERATORS:
        return SPECIAL_OPERATORS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    found = operator_named(namespace, packet, overload) if namespace in NAMESPACES else None
    if found is None:
        raise ArtifactError(f"a graph file asks for operator {name!r:.120}, which is none of {' or '.join(NAMESPACES)}")
    return found


def _node_to_json(node: fx.Node) -> Json:
    entry: Json = {"name": node.name, "op": node.op}
    entry["target"] = target_name(node.target) if node.op == "call_function" else str(node.target)
    if node.args:
        entry["args"] = _encode(node.args)
    if node.kwargs:
        entry["kwargs"] = {k: _encode(v) for k, v in node.kwargs.items()}
    # Only type and shape are kept. Strides are not: a read graph has contiguous values.
    if "val" in node.meta:
        entry["type"] = _type_to_json(node.meta["val"])
    origin = {"source": source_of(node), "module": module_path_of(node), "made_by": node.meta.get("made_by", "")}
    place = {k: node.meta[k] for k in LAYER_KEYS if k in node.meta and k != REPLAY}
    replay = replay_of(node)
    if replay is not None:
        place[REPLAY] = asdict(replay) | {"threshold": _encode(replay.threshold)}
    return entry | {k: v for k, v in origin.items() if v} | place


def _type_to_json(value: Any) -> list[Any] | None:
    """Return [dtype, shape] of a tensor, ["list", […]] or ["tuple", […]] of several, or None without a result."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return [str(value.dtype), [int(d) for d in value.shape]]
    return [type(value).__name__, [_type_to_json(v) for v in value]]


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple | list):
        return [_encode(v) for v in cast("list[Any]", value)]
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {type(value).__name__: str(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    # As hexadecimal text, which has every float64 exactly, and infinities.
    if isinstance(value, float):
        return {"float": value.hex()}
    raise InternalError(f"argument {value!r} cannot be written to a graph file")


def _decode(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(v, nodes) for v in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    # Every object among the arguments has one key, which says what its text is.
    ((kind, text),) = cast("dict[str, str]", value).items()
    if kind == "node":
        return nodes[text]
    if kind == "float":
        return float.fromhex(text)
    return torch.device(text) if kind == "device" else _torch_named(kind, text)


def _torch_named(kind: str, name: str) -> Any:
    """Return an element type, a layout or a memory format of torch by its name."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, _KINDS[kind]):
        raise TypeError(f"{name!r:.80} is no {kind}")
    return found


class _ProgramReader:
    """Reads the graphs of one graph file and their branches; all values share one fake tensor mode."""

    def __init__(self, params: Mapping[str, Tensor], missing_on_meta: bool) -> None:
        self.params, self.missing_on_meta = params, missing_on_meta
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[str, Tensor] = {}

    def graph(self, data: Json) -> fx.GraphModule:
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        # Branches come first: the `get_attr` nodes of the graph around them read them.
        root: Json = {name: self.graph(branch) for name, branch in data["branches"].items()}
        for entry in data["nodes"]:
            name, op, target = entry["name"], entry["op"], entry["target"]
            # Before fx sees a name: fx writes it into source code that Python runs.
            self.check(entry)
            args = tuple(_decode(entry.get("args", []), nodes))
            kwargs = {k: _decode(v, nodes) for k, v in entry.get("kwargs", {}).items()}
            if op == "output":
                graph.output(tuple(args[0]))
                continue
            if op == "get_attr" and target not in root:
                root[target] = self.parameter(entry)
            function = _target_from(target) if op == "call_function" else target
            node = nodes[name] = graph.create_node(op, function, args, kwargs, name)
            node.meta = self.meta(entry)
        return graph_module(root, graph)

    def check(self, entry: Json) -> None:
        """Raise ValueError for a text that fx would write into source code, where it would be more than a name."""
        op, target = entry["op"], entry["target"]
        if op not in ("placeholder", "get_attr", "call_function", "output"):
            raise ValueError(f"there is no node of kind {op!r:.40}")
        names = [entry["name"], *entry.get("kwargs", {}), *([target] if op == "placeholder" else [])]
        if bad := [name for name in names if not is_identifier(name)]:
            raise ValueError(f"{bad[0]!r:.80} is no name")
        if op == "get_attr" and not is_path(target):
            raise ValueError(f"{target!r:.80} is no path of a tensor")

    def parameter(self, entry: Json) -> Tensor:
        if entry["target"] in self.params:
            return self.params[entry["target"]]
        if not self.missing_on_meta:
            raise ArtifactError(f"parameter {entry['target']} is not among the weights")
        dtype, shape = entry["type"]
        return torch.empty(shape, dtype=_torch_named("dtype", dtype), device="meta")

    def meta(self, entry: Json) -> Json:
        meta: Json = {"source": entry.get("source", ""), "module": entry.get("module", "")}
        meta |= {k: entry[k] for k in ("made_by", *LAYER_KEYS) if k in entry}
        if meta.get(LAYER) is not None and not isinstance(meta[LAYER], int):
            raise TypeError(f"layer {meta[LAYER]!r} of {entry['name']}")
        if REPLAY in meta:
            # A threshold may be infinite, which JSON has only as text.
            facts = meta[REPLAY]
            meta[REPLAY] = _REPLAY.validate_python(facts | {"threshold": _decode(facts["threshold"], {})})
        if "type" in entry:
            meta["val"] = self.value(entry["type"])
        return meta

    def value(self, type_: list[Any] | None) -> Any:
        if type_ is None:
            return None
        kind, content = type_
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self.value(t) for t in content)
        if str(type_) not in self.known:  # layers repeat each other, and to make a fake value takes long
            with self.mode:
                self.known[str(type_)] = torch.empty(content, dtype=_torch_named("dtype", kind))
        return self.known[str(type_)]


# A DecoderProgram as JSON: graph files that hold all of it except the weights, and sections of a manifest.


_FACTS = {"config", "state", "outputs", "prefill_outputs", "context_outputs"}
"""Fields of a manifest's decoder section that a graph file has too."""


class _GraphFile(BaseModel):
    decode: Json
    prefill: Json | None
    context: Json | None
    config: DecoderConfig
    state: tuple[State, ...]
    outputs: list[str]
    prefill_outputs: list[str]
    context_outputs: list[str]


def states_of(program: DecoderProgram) -> tuple[State, ...]:
    """Return the states of a program, for a manifest."""
    return tuple(State.model_validate(vars(s) | {"dtype": dtype_name(s.dtype)}) for s in program.state)


def decoder_section(program: DecoderProgram) -> DecoderSection:
    """Return sizes, state, inputs and outputs of a program, for a manifest."""
    lists = ("inputs", "outputs", "prefill_outputs", "context_outputs")
    names: dict[str, Any] = {name: tuple(getattr(program, name)) for name in lists} | {"state": states_of(program)}
    return DecoderSection(config=program.config, weight_bytes=program.params.nbytes(), **names)


def layers_section(program: DecoderProgram) -> LayersSection:
    """Return where every layer is and what replay was inserted, for a manifest."""
    return LayersSection(layers=tuple(program.sites))


def read_params(artifact: StoredArtifact) -> dict[str, Tensor]:
    """Return every parameter of an artifact's rewritten graph, over memory maps of the weight files."""
    return {name: to_torch(array) for name, array in artifact.arrays().items()}


def read_program(artifact: StoredArtifact) -> DecoderProgram:
    """Return the rewritten program of an artifact.

    Raises:
        ArtifactError: the graph cannot be read.
    """
    return program_from_json(artifact.json(GRAPH_AFTER), read_params(artifact))


def program_to_json(program: DecoderProgram) -> Json:
    """Return the program as a graph file holds it: without the values of its parameters."""
    graphs = {"decode": program.graph_module, "prefill": program.prefill, "context": program.context}
    found = {name: None if graph is None else graph_to_json(graph) for name, graph in graphs.items()}
    return found | decoder_section(program).model_dump(mode="json", include=_FACTS)


def program_from_json(data: Json, params: Mapping[str, Tensor], *, missing_on_meta: bool = False) -> DecoderProgram:
    """Return the program of a graph file.

    Args:
        missing_on_meta: a parameter that `params` lacks becomes a tensor on the meta device, without a value.

    Raises:
        ArtifactError: a part is missing or malformed, or an operator or a parameter is unknown.
    """
    try:
        file, read = _GraphFile.model_validate(data), _ProgramReader(params, missing_on_meta).graph
        return DecoderProgram(
            read(file.decode),
            None if file.prefill is None else read(file.prefill),
            file.config,
            state=[StateSpec(s.name, s.shape, torch_dtype(s.dtype), s.role, s.layer, s.sinks) for s in file.state],
            outputs=file.outputs,
            prefill_outputs=file.prefill_outputs,
            context=None if file.context is None else read(file.context),
            context_outputs=file.context_outputs,
        )
    except ArtifactError:
        raise
    except ValidationError as error:
        raise ArtifactError(f"the graph file is malformed: {describe_validation(error)}", hint=_HINT) from error
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:  # also fx's
        text = str(error).partition("\n")[0][: limits.TEXT_ERROR]
        raise ArtifactError(f"the graph file is malformed: {type(error).__name__}: {text}", hint=_HINT) from error


def read_graph_file(path: Path, params: Mapping[str, Tensor], *, missing_on_meta: bool = False) -> DecoderProgram:
    """Return the program of a graph file on disk.

    Raises:
        ArtifactError: the file is missing, or is malformed.
    """
    data: object = read_json(path, "graph file", ArtifactError, size=limits.GRAPH_BYTES, hint=_HINT)
    if not isinstance(data, dict):
        raise ArtifactError("the graph file holds no JSON object", where=str(path), hint=_HINT)
    try:
        return program_from_json(cast("Json", data), params, missing_on_meta=missing_on_meta)
    # The error of a part does not know the file, so the path is put into it here.
    except ArtifactError as error:
        raise ArtifactError(error.what, where=error.where or str(path), hint=error.hint or _HINT) from error


def graph_file_text(program: DecoderProgram) -> str:
    """Return the text of a graph file. People have the listing; with an indent Python's slow encoder would write it."""
    return json.dumps(program_to_json(program), sort_keys=True) + "\n"
