"""Looking at graphs: operators, arguments, values and branches."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule  # pyright: ignore[reportPrivateUsage]  (fx has no public one)

import fastcar_compile.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (it registers the operators)
from fastcar_compile.errors import InternalError

aten = torch.ops.aten


def _declared(operator: object) -> list[Any]:
    """Return the arguments that an operator declares, or raise InternalError where it declares none."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        raise InternalError(f"{operator} has no schema")
    return list(schema.arguments)


def bound(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name. An argument that the call leaves out has the schema's default.

    Raises:
        InternalError: the node calls something that has no schema.
    """
    declared = _declared(node.target)
    defaults = {str(a.name): a.default_value for a in declared if a.has_default_value()}
    given = zip((str(a.name) for a in declared), node.args, strict=False)
    return {**defaults, **dict(given), **node.kwargs}


def index_of(operator: object, name: str) -> int:
    """Return the position of an argument in the operator's schema."""
    return [str(a.name) for a in _declared(operator)].index(name)


def graph_module(root: nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Return a module of the graph whose Python code is generated at its first call.

    A build mostly never calls it. Generating the code of all branches would take a good part of the passes' time.
    """
    return _GraphModule(root if isinstance(root, nn.Module) else dict(root), graph)


class _GraphModule(_LazyGraphModule):
    """A lazy module whose first call is one call for hooks, too; torch's own class calls the module again."""

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return type(self).forward(self, *args, **kwargs)

    forward = _lazy_forward

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """Return the code, without the releases of memory that fx writes behind a value's last use: `; x = None`."""
        # `on_generate_code` is undone on exit, so code that runs keeps its releases of memory.
        with ExitStack() as stack:
            for part in self.modules():
                if isinstance(part, fx.GraphModule):
                    stack.enter_context(part.graph.on_generate_code(lambda _before: _without_releases))
            return super().print_readable(print_output, *args, **kwargs)


def _without_releases(body: list[str]) -> list[str]:
    """Return the lines of a body that fx has generated; a release is an item of its own."""
    kept = (line for line in body if not line.strip().startswith("# No stacktrace found"))
    return ["\n" if line.startswith(";  ") else line for line in kept]


def placeholder_names(module: fx.GraphModule) -> list[str]:
    """Return the placeholder names in order."""
    return [str(n.target) for n in module.graph.nodes if n.op == "placeholder"]


def get_attribute(module: nn.Module, path: str) -> object:
    """Return the attribute at a dotted path."""
    return attrgetter(path)(module)


def tensor_attribute(module: nn.Module, path: str) -> Tensor:
    """Return the tensor at a dotted path.

    Raises:
        InternalError: what is there is no tensor.
    """
    value = get_attribute(module, path)
    if not isinstance(value, Tensor):
        raise InternalError(f"attribute {path} is a {type(value).__name__}, not a tensor")
    return value


def tensor_attributes(module: fx.GraphModule) -> dict[str, Tensor]:
    """Return the tensors that `get_attr` nodes read, by attribute path."""
    names = [str(n.target) for n in module.graph.nodes if n.op == "get_attr"]
    return {name: value for name in names if isinstance(value := get_attribute(module, name), Tensor)}


def branches_of(module: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """Return the branches that `get_attr` nodes read, by attribute name."""
    # A branch that no `cond` reads any more stays a submodule, but is no part of the program.
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    return {name: m for name, m in module.named_children() if isinstance(m, fx.GraphModule) and name in used}


def with_branches(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the module and its branches."""
    yield module
    yield from branches_of(module).values()


def placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Return the placeholder of this name.

    Raises:
        InternalError: there is none.
    """
    for node in graph.find_nodes(op="placeholder"):
        if node.target == name:
            return node
    raise InternalError(f"the graph has no placeholder {name}")


def node_named(graph: fx.Graph, name: str) -> fx.Node:
    """Return the node of this name.

    Raises:
        InternalError: there is none.
    """
    for node in graph.nodes:
        if node.name == name:
            return node
    raise InternalError(f"the graph has no node {name}")


def node_arg(node: fx.Node, index: int) -> fx.Node:
    """Return the positional argument at `index`, which must be a node.

    Raises:
        InternalError: it is missing, or a constant.
    """
    argument = node.args[index] if index < len(node.args) else None
    if not isinstance(argument, fx.Node):
        raise InternalError(f"argument {index} of {node.name} is {argument!r}, not a node")
    return argument


def optional_arg(node: fx.Node, index: int) -> fx.Node | None:
    """Return the positional argument at `index` where it is a node, else None."""
    argument = node.args[index] if index < len(node.args) else None
    return argument if isinstance(argument, fx.Node) else None


def value_of(node: fx.Node) -> Tensor:
    """Return the fake tensor that the node yields."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise InternalError(f"{node.name} yields {type(value).__name__}, not a tensor")
    return value


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of what the node yields."""
    return tuple(int(d) for d in value_of(node).shape)


def is_op(node: object, *packets: Any) -> bool:
    """Return whether the node calls an overload of one of these operator packets."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and getattr(node.target, "overloadpacket", node.target) in packets
    )


def is_same(node: fx.Node) -> bool:
    """Return whether the node is another name of its argument, or a cast or copy to the type that is there."""
    if is_op(node, aten.alias, aten.detach):
        return True
    return (
        is_op(node, aten.to, aten.type_as, aten._to_copy) and value_of(node).dtype == value_of(node_arg(node, 0)).dtype
    )


def argument_names(node: fx.Node) -> list[str]:
    """Return the names of an operator's parameters, in order; none for other nodes."""
    schema = getattr(node.target, "_schema", None)
    return [str(a.name) for a in schema.arguments] if schema and node.op == "call_function" else []


_ACTIVATIONS: dict[Any, str] = {
    getattr(aten, name): name
    for name in (
        *("silu", "gelu", "relu", "sigmoid", "tanh", "mish", "relu6", "leaky_relu", "hardswish", "hardsigmoid"),
        *("hardtanh", "elu", "selu", "celu", "softplus", "log_sigmoid", "threshold", "sin"),
    )
}


def activation_of(node: fx.Node) -> str | None:
    """Return the name of the elementwise nonlinearity that the node computes: "gelu" is by erf, "gelu_tanh" by tanh."""
    if not is_op(node, *_ACTIVATIONS):
        return None
    name = _ACTIVATIONS[getattr(node.target, "overloadpacket", None)]
    approximate = name == "gelu" and node.kwargs.get("approximate", "none") == "tanh"
    return "gelu_tanh" if approximate else name


def squared_relu(node: fx.Node) -> fx.Node | None:
    """Return the ReLU whose product with itself the node is, else None."""
    # `relu * relu` has one input node, which it reads twice.
    (base, *others) = node.all_input_nodes or [node]
    return base if is_op(node, aten.mul) and not others and is_op(base, aten.relu) else None


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return what the graph returns.

    Raises:
        InternalError: it returns something that is no node.
    """
    value = graph.output_node().args[0]
    found = list(value) if isinstance(value, tuple | list) else [value]
    nodes = [n for n in found if isinstance(n, fx.Node)]
    if len(nodes) != len(found):
        raise InternalError(f"the graph returns {found}, which are not all nodes")
    return nodes
