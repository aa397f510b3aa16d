"""What a layer's attention and MLP are, from the graph by layer and role; and rotary position embeddings by meaning."""

import operator
from collections.abc import Mapping

import torch
from torch import fx

from fastcar_compile.errors import InternalError
from fastcar_compile.ir.dataflow import ancestors, between, descendants
from fastcar_compile.ir.layers import PROJECTIONS, Role, layer_of, parameter_of, replay_of, role_nodes
from fastcar_compile.ir.ops.linear import FLOAT_LINEARS, INTEGER_LINEARS
from fastcar_compile.ir.provenance import error_at, module_path_of, source_of
from fastcar_compile.ir.query import (
    activation_of,
    bound,
    branches_of,
    is_op,
    node_arg,
    placeholder,
    shape_of,
    squared_relu,
)
from fastcar_compile.ir.types import AttentionSite, LayerSite, MlpSite

aten = torch.ops.aten
LINEARS = (aten.linear, *FLOAT_LINEARS, *INTEGER_LINEARS)


_NEEDED = (Role.ATTENTION, Role.RESIDUAL, Role.EXIT, Role.UP_PROJ, Role.DOWN_PROJ, Role.ACTIVATION)


def layer_sites(module: fx.GraphModule) -> list[LayerSite]:
    """Return the sites of all layers, in order; none before find-sites ran.

    Raises:
        InternalError: a layer lacks a node, such as the linears of an MLP that an accelerator computes.
    """
    outer = branch_operands(module)
    return [_site(layer, nodes, outer) for layer, nodes in role_nodes(module).items()]


def branch_operands(module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Return the placeholders of all `cond` branches -> the operands that they stand for."""
    branches, found = branches_of(module), dict[fx.Node, fx.Node]()
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond):
        _, *arms, operands = node.args
        for arm in arms:
            inner = branches[str(arm.target)].graph.find_nodes(op="placeholder")
            # Both branches take all operands, so the zip pairs by place.
            found |= dict(zip(inner, operands, strict=True))
    return found


def _site(layer: int, nodes: Mapping[str, fx.Node], outer: Mapping[fx.Node, fx.Node]) -> LayerSite:
    """Read the site of one layer off its nodes; `outer` as `branch_operands` returns it."""
    if missing := [role for role in _NEEDED if role not in nodes]:
        raise InternalError(f"layer {layer} has no node of role {missing[0]}")
    attention, residual, leave = nodes[Role.ATTENTION], nodes[Role.RESIDUAL], nodes[Role.EXIT]
    region_output, gate = mlp_output(nodes), nodes.get(Role.GATE)
    first = nodes.get(Role.GATE_PROJ, nodes[Role.UP_PROJ])
    return LayerSite(
        layer=layer,
        module_path=module_path_of(first).rpartition(".")[0],
        source=source_of(first),
        entry=entry_of(residual, attention).name,
        residual=residual.name,
        region_output=region_output.name,
        exit=leave.name,
        attention=attention_site(attention),
        mlp=_mlp_site(nodes, outer),
        parallel=not _depends_on(region_output, residual, layer),
        replay=None if gate is None else replay_of(gate),
    )


def _mlp_site(nodes: Mapping[str, fx.Node], outer: Mapping[fx.Node, fx.Node]) -> MlpSite:
    linears = [nodes[role] for role in PROJECTIONS if role in nodes]
    x, weights = node_arg(linears[0], 0), [node_arg(n, 1) for n in linears]
    biases = [bound(n)["bias"] for n in linears]
    return MlpSite(
        input=outer.get(x, x).name,
        output=linears[-1].name,
        linears=tuple(n.name for n in linears),
        weights=tuple(parameter_of(outer.get(n, n)) for n in weights),
        biases=tuple(None if n is None else parameter_of(outer.get(n, n)) for n in biases),
        activation=_activation(nodes[Role.ACTIVATION], linears),
        gated=len(linears) == 3,
        hidden=shape_of(nodes[Role.EXIT])[-1],
        intermediate=shape_of(node_arg(linears[-1], 0))[-1],
    )


def _activation(node: fx.Node, linears: list[fx.Node]) -> str:
    """Return the activation's name, and whether it stands where an MLP kernel expects it."""
    # Quantised, the activation is `x * activation_factor(x, name)`: the factor's second argument names it.
    tabled = [n for n in node.all_input_nodes if is_op(n, torch.ops.fastcar.activation_factor)]
    name = activation_of(node) or str(tabled[0].args[1] if tabled else node.target).removeprefix("aten.").split(".")[0]
    inner = node_arg(linears[-1], 0)
    if is_op(inner, aten.where):  # rows that replay are zeroed before a linear with a bias
        inner = node_arg(inner, 2)
    # A squared ReLU is the product behind the node of the role, so that product is the factor.
    squares = [user for user in node.users if squared_relu(user)]
    name, result = ("relu2", squares[0]) if len(squares) == 1 else (name, node)
    factors = [result, linears[-2]] if len(linears) == 3 else [result]
    found = inner.all_input_nodes if len(linears) == 3 and is_op(inner, aten.mul) else [inner]
    # An MLP kernel computes `down(act(gate) * up)` and no other arrangement of the same nodes.
    direct = node_arg(node, 0) is linears[0] and set(found) == set(factors)
    return name if direct else f"{name}, not directly between two linears"


def attention_site(node: fx.Node) -> AttentionSite:
    """Return what an attention node reads, and its dimensions."""
    query, keys, values, scale = node_arg(node, 0), node_arg(node, 1), node_arg(node, 2), node.args[4]
    if not isinstance(scale, float):
        raise InternalError(f"the scale of {node.name} is {scale!r}, not a number")
    _, heads, _, dim = shape_of(query)
    given = bound(node)
    return AttentionSite(
        *(node.name, query.name, keys.name, values.name, scale, heads, shape_of(keys)[1], dim, shape_of(keys)[2]),
        window=given.get("window"),
        sinks=given.get("sinks", 0),
        softcap=given.get("softcap"),
    )


def entry_of(residual: fx.Node, attention: fx.Node) -> fx.Node:
    """Return what the residual add joins to attention: the residual stream before the layer.

    With cross-attention the residual is a second sum, of the first one and of what cross-attention makes of it.
    """
    layer = layer_of(residual)
    # The stream is the operand of another layer, or the operand that does not follow from attention.
    for node in residual.all_input_nodes:
        if layer_of(node) != layer or not _depends_on(node, attention, layer):
            return node
    for node, other in zip(residual.all_input_nodes, reversed(residual.all_input_nodes), strict=True):
        if node is not other and is_op(node, aten.add) and _depends_on(other, node, layer):
            return entry_of(node, attention)
    raise InternalError(f"both operands of {residual.name} depend on {attention.name}")


def mlp_output(nodes: Mapping[str, fx.Node]) -> fx.Node:
    """Return what the closing add joins to the residual: the MLP's own result, or that of the replay around it."""
    residual = nodes[Role.RESIDUAL]
    (added,) = (n for n in nodes[Role.EXIT].all_input_nodes if n is not residual)
    return added


def mlp_start(*, residual: fx.Node, entry: fx.Node, x: fx.Node, output: fx.Node) -> fx.Node:
    """Return what the nodes begin with that are the MLP's alone, its norm among them.

    That is the residual. In a parallel block it is the layer's entry, or the MLP's input `x` where attention reads the
    same norm.
    """
    if residual in ancestors(output, until={residual, entry}):
        return residual
    # In a parallel block attention may read the MLP's norm. That norm runs also when the MLP does not, so the MLP
    # begins behind it.
    region = {n for n in between(entry, output) if n is not entry}
    shared = any(user not in region for node in region if node is not output for user in node.users)
    return x if shared else entry


def _depends_on(node: fx.Node, target: fx.Node, layer: int | None) -> bool:
    """Whether `node` depends on `target`, on a path inside of one layer."""
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if current is target:
            return True
        fresh = [n for n in current.all_input_nodes if n not in seen and layer_of(n) == layer]
        seen |= set(fresh)
        stack += fresh
    return False


_PARTS = (aten.view, aten.slice, aten.clone, operator.getitem, aten.split, aten.unbind, aten.chunk)


class Rotations:
    """The rotations of one graph, in whatever operators they are written.

    Attributes:
        by_position: what follows from the input `position` and from constants alone.
    """

    def __init__(self, graph: fx.Graph) -> None:
        position = placeholder(graph, "position")
        others = [n for n in graph.find_nodes(op="placeholder") if n is not position]
        self.by_position = descendants(position) - descendants(*others)
        self._ends = self.by_position | {n for n in graph.nodes if n.op != "call_function" or _is_projection(n)}

    def of(self, value: fx.Node) -> set[fx.Node]:
        """Return the nodes between a projection and `value` that depend on the position by themselves."""
        rotated = set[fx.Node]()
        # Nodes compare by their place in the graph, so an input is looked at before its reader.
        for node in sorted(ancestors(value, until=self._ends) - self._ends):
            if any(n in rotated or n in self.by_position for n in node.all_input_nodes):
                rotated.add(node)
        return rotated

    def sources(self, value: fx.Node) -> list[fx.Node]:
        """Return what is rotated: the nodes that the rotation of `value` begins with; none: nothing rotates it."""
        rotated = self.of(value)
        inside = rotated | self.by_position
        free = {n for r in rotated for n in r.all_input_nodes if n not in inside and n.op == "call_function"}
        # Halves and their negatives are read too: only the first of the inputs are sources.
        return [n for n in free if not (ancestors(n) - {n}) & free]

    def unrotated(self, attention: fx.Node) -> tuple[fx.Node, bool]:
        """Return the query of an attention from before its rotation, and whether heads are its third axis.

        Returns:
            A node of shape [B, Hq, T, D], or of [B, T, Hq, D] and True.

        Raises:
            CompileError: the query is not rotated, or not from one value of these shapes.
        """
        query = node_arg(attention, 0)
        batch, heads, tokens, dim = shape_of(query)
        found = set(self.sources(query))
        if not found:
            what = "rotary='key' needs rotary embeddings: this query does not depend on the position by itself"
            raise error_at(attention, what, "use rotary='both'")
        swapped = any(_swaps(node) for node in self.of(query))
        wanted = (batch, tokens, heads, dim) if swapped else (batch, heads, tokens, dim)
        # Parts of one query, such as that which does not rotate, come from the same value.
        while (len(found) > 1 or shape_of(*found) != wanted) and is_op(last := max(found), *_PARTS):
            found = found - {last} | {node_arg(last, 0)}
        if len(found) > 1 or shape_of(*found) != wanted:
            what = "rotary='key': the query from before its rotation is not one value of a row for each head"
            raise error_at(attention, what, "use rotary='both'")
        return found.pop(), swapped


def _swaps(node: fx.Node) -> bool:
    """Whether a node exchanges the axes of tokens and heads."""
    if is_op(node, aten.transpose):
        return {axis % 4 for axis in node.args[1:3] if isinstance(axis, int)} == {1, 2}
    return is_op(node, aten.permute) and node.args[1] == [0, 2, 1, 3]


def _is_projection(node: fx.Node) -> bool:
    """A linear of any precision, an embedding, or an attention: what lies behind it is not this layer's rotation."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    named = name.startswith(("linear", "offloaded", "embedding", "attention", "window_attention"))
    return named or is_op(node, aten.addmm, aten.mm, aten.matmul)
