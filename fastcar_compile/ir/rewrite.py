"""Graph editing shared by the passes: inserted nodes carry a value, a source line, a layer and their pass."""

import operator
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg

from fastcar_compile.ir.layers import PARAMETER, inherit_layer, move_role, parameter_of
from fastcar_compile.ir.provenance import ORIGIN_KEYS
from fastcar_compile.ir.query import is_op, tensor_attribute, value_of
from fastcar_compile.ir.weight_checks import lost
from fastcar_compile.ir.weights import LazyWeights, Make, quantized

aten = torch.ops.aten


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the fake tensor mode that a graph's values share, or a new one."""
    vals = (n.meta.get("val") for n in graph.nodes)
    known = next((v.fake_mode for v in vals if isinstance(v, FakeTensor)), None)
    return known or FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(graph: fx.Graph, value: Tensor) -> Tensor:
    """Return a CPU value of the graph's fake mode with the shape and dtype of `value`, on whatever device that is."""
    mode = fake_mode_of(graph)
    known, key = _known_values(mode), (value.dtype, tuple(value.shape))
    if key not in known:
        with mode:
            known[key] = torch.empty(value.shape, dtype=value.dtype)
    return known[key]


def _known_values(mode: FakeTensorMode) -> dict[object, Any]:
    """Return values that nodes of a graph share.

    Layers mostly repeat each other, and to make a fake value takes longer than the rest of an edit.
    """
    return cast("dict[object, Any]", vars(mode).setdefault("fastcar_values", {}))


def set_origin(node: fx.Node, origin: fx.Node, made_by: str) -> None:
    """Give an inserted node the source and the layer of `origin`, and the name of the pass that made it."""
    for key in ORIGIN_KEYS:
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
    node.meta["made_by"] = made_by
    inherit_layer(node, origin)


@dataclass(frozen=True)
class Inserter:
    """Inserts calls at a graph's insertion point, in the name of a pass: they have source and layer of `origin`."""

    graph: fx.Graph
    origin: fx.Node
    made_by: str

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert `target(*args, **kwargs)`, with meta['val'] from the fake definition."""
        node = self.graph.call_function(target, args, kwargs)
        set_origin(node, self.origin, self.made_by)
        node.meta["val"] = fake_value(self.graph, node)
        return node


@contextmanager
def before(node: fx.Node, made_by: str, *, origin: fx.Node | None = None) -> Generator[Inserter]:
    """Yield what inserts calls in front of a node; `origin` is the node itself where none is given."""
    with node.graph.inserting_before(node):
        yield Inserter(node.graph, origin or node, made_by)


@contextmanager
def after(node: fx.Node, made_by: str, *, origin: fx.Node | None = None) -> Generator[Inserter]:
    """Yield what inserts calls behind a node, each in front of the one before; `origin` as of `before`."""
    with node.graph.inserting_after(node):
        yield Inserter(node.graph, origin or node, made_by)


def rewrite_each(
    modules: Iterable[fx.GraphModule],
    matches: Callable[[fx.Node], object],
    rewrite: Callable[[fx.GraphModule, fx.Node], None],
) -> bool:
    """Rewrite every node that matches, in order, and remove what nothing reads any more; return whether one matched.

    Args:
        matches: judges all nodes of a graph before the first of them is rewritten.
    """
    modified = False
    for module in modules:
        found = [node for node in module.graph.nodes if matches(node)]
        for node in found:
            rewrite(module, node)
        if found:
            module.graph.eliminate_dead_code()
        modified |= bool(found)
    return modified


def replace(old: fx.Node, new: fx.Node) -> None:
    """Put `new` in the place of `old` and its role, and erase `old`. `new` itself may read `old`'s inputs only."""
    move_role(old, new)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def replace_call(old: fx.Node, made_by: str, target: Callable[..., Any], *args: Any) -> None:
    """Put `target(*args)` in the place of `old` and its role."""
    with before(old, made_by) as emit:
        new = emit(target, *args)
    replace(old, new)


def attribute(module: fx.GraphModule, target: str, value: Tensor, origin: fx.Node, made_by: str) -> fx.Node:
    """Insert a `get_attr` node for a new tensor attribute, which is registered at its first use."""
    path, _, leaf = target.rpartition(".")
    owner = module.get_submodule(path)
    # A second node of one name, such as that of a table which layers share, reads what the first one registered.
    if not hasattr(owner, leaf):
        owner.register_buffer(leaf, value)
    node = module.graph.get_attr(target)
    set_origin(node, origin, made_by)
    node.meta["val"] = fake_like(module.graph, value)
    return node


@dataclass(frozen=True)
class Edit:
    """What a pass gives to all that it derives.

    Attributes:
        made_by: its name. lazy: where weights come from that are not in memory.
        losses: gets the share of its values that another format of a weight loses.
        made: what was derived already, by its names: graphs that read one parameter share what is made of it.
    """

    made_by: str
    lazy: LazyWeights | None
    losses: dict[str, float] = field(default_factory=dict[str, float])
    made: dict[tuple[str, ...], tuple[Tensor, ...]] = field(default_factory=dict[tuple[str, ...], tuple[Tensor, ...]])


def derived_parameters(
    module: fx.GraphModule,
    parameter: fx.Node,
    suffixes: tuple[str, ...],
    make: Make,
    edit: Edit,
    *,
    origin: fx.Node,
    by_rows: bool = True,
) -> tuple[fx.Node, ...]:
    """Insert `get_attr` nodes for what `make` gives of a parameter, `<parameter>_<suffix>`.

    A parameter without a value (meta device) is derived by a recipe of `edit.lazy` when its value is asked for.

    Args:
        by_rows: the results are the parameter in another format, row by row, and `parameter_of` gives its name for
            them. Otherwise they are parameters of their own, such as a transposed weight, and `make` gets the whole
            parameter.
    """
    target = str(parameter.target)
    # On the meta device `make` gives shapes only, and the recipe runs when the value is asked for.
    value = tensor_attribute(module, target)
    names = tuple(f"{target}_{suffix}" for suffix in suffixes)
    if edit.lazy is not None and value.is_meta:
        edit.lazy.derive(names, target, make, by_rows=by_rows)
    if names not in edit.made:
        edit.made[names] = quantized(make, value) if by_rows else make(value)
        if by_rows and (count := lost(target, value, edit.made[names])):
            edit.losses[target] = count / value.numel()
    made = zip(names, edit.made[names], strict=True)
    nodes = tuple(attribute(module, n, t, origin, edit.made_by) for n, t in made)
    for node in nodes:
        # `parameter_of` gives the old name for another format of a
        # weight. A rearranged weight is a parameter of its own.
        if by_rows:
            node.meta[PARAMETER] = parameter_of(parameter)
    return nodes


def fake_value(graph: fx.Graph, node: fx.Node) -> Any:
    """Return what the node yields on its arguments' fake values; equal calls share one value."""
    arguments = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    mode = fake_mode_of(graph)
    known = _known_values(mode)
    key = (node.target, _signature(arguments))
    if key not in known:
        args, kwargs = arguments
        with mode, torch.no_grad():
            known[key] = cast("Callable[..., Any]", node.target)(*args, **kwargs)
    return known[key]


def _signature(value: object) -> object:
    """Return what a fake definition can see of an argument, as a key."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.stride(), str(value.device))
    if isinstance(value, list | tuple):
        return tuple(_signature(v) for v in cast("Sequence[object]", value))
    if isinstance(value, dict):
        return tuple((k, _signature(v)) for k, v in cast("dict[object, object]", value).items())
    return (type(value), value)


def add_placeholder(graph: fx.Graph, name: str, shape: Iterable[int], dtype: torch.dtype, made_by: str) -> fx.Node:
    """Insert a placeholder after the last one; its node name and target are `name`."""
    # Inputs are paired with their names in order, so a new one goes behind all others.
    last = graph.find_nodes(op="placeholder")[-1]
    mode = fake_mode_of(graph)
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta["val"] = mode.from_tensor(torch.empty(tuple(shape), dtype=dtype), static_shapes=True)
    node.meta["made_by"] = made_by
    return node


def branch_input(graph: fx.Graph, name: str, value: Tensor, origin: fx.Node, made_by: str) -> fx.Node:
    """Add a placeholder with a fake value to a branch; it has source and layer of `origin`."""
    node = graph.placeholder(name)
    set_origin(node, origin, made_by)
    node.meta["val"] = value
    return node


def conditional(
    emit: Inserter,
    module: fx.GraphModule,
    condition: fx.Node,
    branches: dict[str, fx.GraphModule],
    operands: list[fx.Node],
    like: fx.Node,
) -> fx.Node:
    """Insert `cond(condition, first, second, operands)` and return its one result, which is like the value of `like`.

    Args:
        branches: the two, by what they do: the submodules are `<name>_branch_<layer>`. They take all operands.
    """
    arms = list[fx.Node]()
    for kind, branch in branches.items():
        name = f"{kind}_branch_{emit.origin.meta['layer']}"
        module.add_submodule(name, branch)
        arms.append(emit.graph.get_attr(name))
        inherit_layer(arms[-1], emit.origin)
    result = emit.graph.call_function(torch.ops.higher_order.cond, (condition, *arms, tuple(operands)))
    set_origin(result, emit.origin, emit.made_by)
    # A `cond` yields a tuple, also of one value.
    result.meta["val"] = (like.meta["val"],)
    return emit(operator.getitem, result, 0)


def set_outputs(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Make the graph return these nodes as a flat tuple."""
    graph.output_node().args = (tuple(nodes),)


# Memory layouts: what a model may write behind a tensor depends on its strides, which a rewrite may change.


_SAME_MEMORY = (aten.transpose, aten.permute, aten.t, aten.unsqueeze, aten.squeeze, aten.alias, aten.detach)


def replace_layout(old: fx.Node, new: fx.Node) -> None:
    """Put `new` in the place of `old`, whose memory layout may be another one."""
    # torch.export recorded the views behind the old node for its strides.
    if value_of(new).stride() != value_of(old).stride():
        free_views(old)
    replace(old, new)


def free_views(node: fx.Node) -> None:
    """Turn views of a node, whose layout a rewrite has changed, into reshapes: they are right for any layout."""
    for user in node.users:
        if is_op(user, aten.view):
            user.target = aten.reshape.default
        elif is_op(user, *_SAME_MEMORY):
            free_views(user)
