"""Graph editing shared by the passes: inserted nodes carry a value, a source line and their pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode

from fastcar_compile.errors import InternalError
from fastcar_compile.ir.program import get_attribute

_KEPT_META = ("nn_module_stack", "stack_trace")


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake tensor mode of a graph's values: of the first that has one, for a graph's values share it."""
    vals = (n.meta.get("val") for n in graph.nodes)
    return next((v.fake_mode for v in vals if isinstance(v, FakeTensor)), None) or FakeTensorMode(
        allow_non_fake_inputs=True
    )


def fake_like(graph: fx.Graph, value: Tensor) -> Tensor:
    """A CPU value of the graph's fake mode with the shape and dtype of `value`, which may be on the meta device."""
    mode = fake_mode_of(graph)
    known, key = _known_values(mode), (value.dtype, tuple(value.shape))
    if key not in known:
        with mode:
            known[key] = torch.empty(value.shape, dtype=value.dtype)
    return known[key]


def _known_values(mode: FakeTensorMode) -> dict[object, Any]:
    """Values that nodes of a graph share: layers mostly repeat each other, and to make a fake value takes longer
    than the rest of an edit."""
    return vars(mode).setdefault("fastcar_values", {})


def set_origin(node: fx.Node, origin: fx.Node, made_by: str) -> None:
    """Give an inserted node the source of `origin` and the name of the pass that made it."""
    for key in _KEPT_META:
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
    node.meta["made_by"] = made_by


def call(
    graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], *, origin: fx.Node, made_by: str, **kwargs: Any
) -> fx.Node:
    """Insert `target(*args, **kwargs)` at the graph's insertion point, with meta['val'] from the fake definition."""
    node = graph.call_function(target, args, kwargs)
    set_origin(node, origin, made_by)
    node.meta["val"] = fake_value(graph, node)
    return node


def attribute(module: fx.GraphModule, target: str, value: Tensor, origin: fx.Node, made_by: str) -> fx.Node:
    """A `get_attr` node at the insertion point for a new tensor attribute, which is registered at its first use."""
    path, _, leaf = target.rpartition(".")
    owner = module.get_submodule(path)
    if not hasattr(owner, leaf):
        owner.register_buffer(leaf, value)
    node = module.graph.get_attr(target)
    set_origin(node, origin, made_by)
    node.meta["val"] = fake_like(module.graph, value)
    return node


def fake_value(graph: fx.Graph, node: fx.Node) -> Any:
    """What the node yields on its arguments' fake values; equal calls share one value."""
    arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    mode = fake_mode_of(graph)
    known = _known_values(mode)
    key = (node.target, _signature(arguments))
    if key not in known:
        args, kwargs = arguments
        with mode, torch.no_grad():
            known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[key]


def _signature(value: Any) -> object:
    """What a fake definition can see of an argument, as a key."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.stride(), str(value.device))
    if isinstance(value, list | tuple):
        return tuple(_signature(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _signature(v)) for k, v in value.items())
    return (type(value), value)


def add_placeholder(graph: fx.Graph, name: str, shape: Iterable[int], dtype: torch.dtype, made_by: str) -> fx.Node:
    """A new placeholder after the last one; its node name and target are `name`."""
    last = graph.find_nodes(op="placeholder")[-1]
    mode = fake_mode_of(graph)
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta["val"] = mode.from_tensor(torch.empty(tuple(shape), dtype=dtype), static_shapes=True)
    node.meta["made_by"] = made_by
    return node


def placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """The placeholder of this name."""
    return next(n for n in graph.find_nodes(op="placeholder") if n.target == name)


def node_named(graph: fx.Graph, name: str) -> fx.Node:
    """The node of this name."""
    return next(n for n in graph.nodes if n.name == name)


def descendants(*nodes: fx.Node) -> set[fx.Node]:
    """Every node that depends on one of `nodes`, themselves included."""
    found = set(nodes)
    stack = [*nodes]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def ancestors(*nodes: fx.Node) -> set[fx.Node]:
    """Every node that one of `nodes` depends on, themselves included."""
    found = set(nodes)
    stack = [*nodes]
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                stack.append(parent)
    return found


def in_order(graph: fx.Graph, nodes: set[fx.Node]) -> list[fx.Node]:
    """The nodes of a set in graph order."""
    return [n for n in graph.nodes if n in nodes]


def between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Every node on a path from `first` to `last`, both included, in graph order; looks at no node before `first` that
    it does not lead to, so that the cost of a layer does not grow with the layers around it."""
    reached = {first}
    for node in sorted(ancestors_until(last, {first})):
        if any(a in reached for a in node.all_input_nodes):
            reached.add(node)
    return sorted(reached)


def node_arg(node: fx.Node, index: int) -> fx.Node:
    """The positional argument at `index`, which must be a node.

    Raises:
        InternalError: it is missing, or a constant.
    """
    argument = node.args[index] if index < len(node.args) else None
    if not isinstance(argument, fx.Node):
        raise InternalError(f"argument {index} of {node.name} is {argument!r}, not a node")
    return argument


def is_op(node: object, *packets: Any) -> bool:
    """Whether the node calls an overload of one of these operator packets."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and getattr(node.target, "overloadpacket", node.target) in packets
    )


_ACTIVATIONS = {
    torch.ops.aten.silu: "silu",
    torch.ops.aten.gelu: "gelu",
    torch.ops.aten.relu: "relu",
    torch.ops.aten.sigmoid: "sigmoid",
    torch.ops.aten.tanh: "tanh",
}


def activation_of(node: fx.Node) -> str | None:
    """Name of the elementwise nonlinearity that the node computes: "gelu" is by erf, "gelu_tanh" by tanh."""
    if not is_op(node, *_ACTIVATIONS):
        return None
    name = _ACTIVATIONS[node.target.overloadpacket]  # type: ignore[union-attr]
    approximate = name == "gelu" and node.kwargs.get("approximate", "none") == "tanh"
    return "gelu_tanh" if approximate else name


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """What the graph returns."""
    value = graph.output_node().args[0]
    return list(value) if isinstance(value, tuple | list) else [value]  # type: ignore[list-item]


def set_outputs(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Make the graph return these nodes as a flat tuple."""
    graph.output_node().args = (tuple(nodes),)


def evaluate(module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Tensor]) -> Tensor | None:
    """The concrete value of a node when some nodes' values are given; None where it depends on another input."""
    values: dict[fx.Node, Any] = dict(known)
    needed = ancestors_until(node, set(known))
    for current in in_order(module.graph, needed - set(known)):
        if current.op == "get_attr":
            values[current] = get_attribute(module, str(current.target))
            continue
        if current.op != "call_function":
            return None
        args, kwargs = fx.node.map_arg((current.args, dict(current.kwargs)), lambda n: values[n])
        values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def ancestors_until(node: fx.Node, stop: set[fx.Node]) -> set[fx.Node]:
    """Ancestors of `node`, itself included, not looking past `stop`."""
    found = {node}
    stack = [node] if node not in stop else []
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                if parent not in stop:
                    stack.append(parent)
    return found
