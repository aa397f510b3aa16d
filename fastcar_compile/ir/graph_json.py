"""torch.fx graphs as JSON: no pickle and no code is executed; operators resolve in torch.ops only."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.errors import ArtifactError, InternalError
from fastcar_compile.ir.program import graph_module, module_path_of, source_of

_NAMESPACES = ("aten", "fastcar")
_SPECIAL = {"operator.getitem": operator.getitem, "cond": torch.ops.higher_order.cond}


def graph_to_json(module: fx.GraphModule) -> dict[str, Any]:
    """The graph, its branches and where each node comes from. Parameters are kept by name only."""
    branches = {n: graph_to_json(m) for n, m in module.named_children() if isinstance(m, fx.GraphModule)}
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    return {
        "nodes": [_node_to_json(n) for n in module.graph.nodes],
        "branches": {n: b for n, b in branches.items() if n in used},
    }


def graph_from_json(data: Mapping[str, Any], params: Mapping[str, Tensor]) -> fx.GraphModule:
    """The inverse of `graph_to_json`; `params` gives the tensors that `get_attr` nodes read.

    Raises:
        ArtifactError: an operator or a parameter is unknown, or the data is malformed.
    """
    try:
        return _read_graph(data, params)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ArtifactError(f"the graph file is malformed: {type(error).__name__}: {error}") from error


def graph_to_text(module: fx.GraphModule) -> str:
    """Readable listing: one line per node with shape, source and the pass that made it; branches follow."""
    lines: list[str] = []
    for node in module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        notes = [f"made by {node.meta['made_by']}"] if "made_by" in node.meta else []
        notes += [t for t in (module_path_of(node), source_of(node)) if t]
        expression = node.op if node.op == "placeholder" else _expression(node)
        lines.append(f"{node.name}: {_type_text(node)} = {expression}" + (f"  # {', '.join(notes)}" if notes else ""))
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule) and name in used:
            lines += ["", f"{name}:", *("    " + line for line in graph_to_text(child).splitlines())]
    return "\n".join(lines) + "\n"


def _expression(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"get_attr {node.target}"
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    return f"{_target_name(node.target)}({', '.join(arguments)})"


def _type_text(node: fx.Node) -> str:
    val = node.meta.get("val")
    if isinstance(val, Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
    return type(val).__name__ if val is not None else "branch"


def _target_name(target: Any) -> str:
    for name, special in _SPECIAL.items():
        if target is special:
            return name
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return str(target)
    raise InternalError(f"operator {target} cannot be written to a graph file")


def _target_from(name: str) -> Any:
    if name in _SPECIAL:
        return _SPECIAL[name]
    namespace, _, rest = name.partition(".")
    if namespace not in _NAMESPACES:
        raise ArtifactError(f"operator {name} of a graph file is not of {' or '.join(_NAMESPACES)}")
    packet, _, overload = rest.rpartition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _node_to_json(node: fx.Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.name, "op": node.op}
    entry["target"] = _target_name(node.target) if node.op == "call_function" else str(node.target)
    if node.args:
        entry["args"] = _encode(node.args)
    if node.kwargs:
        entry["kwargs"] = {k: _encode(v) for k, v in node.kwargs.items()}
    val = node.meta.get("val")
    if isinstance(val, Tensor):
        entry["type"] = [str(val.dtype), [int(d) for d in val.shape]]
    origin = {"source": source_of(node), "module": module_path_of(node), "made_by": node.meta.get("made_by", "")}
    return entry | {k: v for k, v in origin.items() if v}


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple | list):
        return [_encode(v) for v in value]
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {type(value).__name__: str(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    raise InternalError(f"argument {value!r} cannot be written to a graph file")


def _decode(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    if kind == "node":
        return nodes[text]
    if kind == "float":
        return float.fromhex(text)
    if kind == "device":
        return torch.device(text)
    return getattr(torch, text.removeprefix("torch."))


def _read_graph(data: Mapping[str, Any], params: Mapping[str, Tensor]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    root: dict[str, Any] = {n: _read_graph(b, params) for n, b in data["branches"].items()}
    for entry in data["nodes"]:
        name, op, target = entry["name"], entry["op"], entry["target"]
        args = tuple(_decode(entry.get("args", []), nodes))
        kwargs = {k: _decode(v, nodes) for k, v in entry.get("kwargs", {}).items()}
        if op == "output":
            graph.output(tuple(args[0]))
            continue
        if op == "get_attr" and target not in root:
            if target not in params:
                raise ArtifactError(f"parameter {target} is not among the weights")
            root[target] = params[target]
        function = _target_from(target) if op == "call_function" else target
        node = nodes[name] = graph.create_node(op, function, args, kwargs, name)
        node.meta = {"made_by": entry["made_by"]} if "made_by" in entry else {}
        node.meta["source"], node.meta["module"] = entry.get("source", ""), entry.get("module", "")
        if "type" in entry:
            dtype, shape = entry["type"]
            node.meta["val"] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
    return graph_module(root, graph)
