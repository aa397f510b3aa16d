"""Layer and role of a node, as metadata that copies, rewrites and graph files keep.

`meta["layer"]`: the number of the decoder layer that the node belongs to, or None before, between and after the layers.
`meta["role"]`: what the node is in its layer, where it is one of `Role`; of a state's placeholder its `StateRole`.
`meta["replay"]`: `ReplayFacts`, on the node of role GATE.
The pass find-sites writes the first two; whatever is inserted later inherits the layer of the node that it stands for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import torch
from torch import fx

from fastcar_compile.errors import InternalError
from fastcar_compile.ir.dataflow import ancestors, descendants
from fastcar_compile.ir.query import bound, is_op, shape_of, with_branches
from fastcar_compile.ir.types import ReplayFacts

fastcar = torch.ops.fastcar


WINDOWED = (fastcar.window_attention, fastcar.exact_window_attention)
ATTENTIONS = (fastcar.attention, fastcar.exact_attention, *WINDOWED)
"""Attention of a decoder layer to its own cache; of these, to a window."""


@dataclass(frozen=True)
class RingRows:
    """The rows of a ring cache: `sinks` first positions, and the last `rows` others."""

    sinks: int
    rows: int


@dataclass(frozen=True)
class Window:
    """What one query of an attention sees: the first `sinks` positions and the last `window` ones."""

    sinks: int
    window: int


def ring_of(written: fx.Node) -> RingRows | None:
    """Return the rows of a written cache; None: it is no ring."""
    if not is_op(written, fastcar.ring_write):
        return None
    sinks = cast("int", written.args[3])
    return RingRows(sinks, shape_of(written)[2] - sinks)


def window_of(attention: fx.Node) -> Window | None:
    """Return what an attention sees; None: all earlier positions."""
    if not is_op(attention, *WINDOWED):
        return None
    return Window(cast("int", attention.args[5]), cast("int", attention.args[6]))


def softcap_of(attention: fx.Node) -> float | None:
    """Return the soft-cap of an attention's logits; None: there is none."""
    return bound(attention).get("softcap")


LAYER, ROLE, REPLAY, PARAMETER = "layer", "role", "replay", "parameter"
LAYER_KEYS = (LAYER, ROLE, REPLAY, PARAMETER)


class Role(StrEnum):
    """What a node is in its layer: the nodes that passes and backends ask for."""

    ATTENTION = "attention"
    RESIDUAL = "residual"
    """The add that joins attention to the residual stream."""
    GATE_PROJ = "gate_proj"
    UP_PROJ = "up_proj"
    DOWN_PROJ = "down_proj"
    ACTIVATION = "activation"
    MLP = "mlp"
    """The whole MLP as one call of an accelerator; the linears and the activation are gone then."""
    EXIT = "exit"
    """The add that joins the MLP to the residual stream: the layer's result."""
    SCORE = "score"
    GATE = "gate"
    """The replay decision, bool [B]."""


PROJECTIONS = (Role.GATE_PROJ, Role.UP_PROJ, Role.DOWN_PROJ)
"""The linears of an MLP, in the order of the computation. A layer without a gate has the last two."""


def layer_of(node: fx.Node) -> int | None:
    """Return the number of the layer that the node belongs to; None outside of the layers."""
    return cast("int | None", node.meta.get(LAYER))


def role_of(node: fx.Node) -> str | None:
    """Return the role of the node in its layer, or None."""
    role = node.meta.get(ROLE)
    return None if role is None else str(role)


def replay_of(node: fx.Node) -> ReplayFacts | None:
    """Return what insert-replay decided, on a node of role GATE; else None."""
    return cast("ReplayFacts | None", node.meta.get(REPLAY))


def parameter_of(node: fx.Node) -> str:
    """Return the name of the parameter that a `get_attr` node reads, as it was called before quantisation."""
    return str(node.meta.get(PARAMETER, node.target))


def mark(node: fx.Node, layer: int | None, role: StrEnum | None = None) -> None:
    """Write layer and role of a node."""
    node.meta[LAYER] = layer
    node.meta.pop(ROLE, None)
    if role is not None:
        node.meta[ROLE] = str(role)


def inherit_layer(node: fx.Node, origin: fx.Node) -> None:
    """Give an inserted node the layer of the node that it stands for; a role it gets by `move_role` only."""
    # A copied node may bring the marks of what it was copied from.
    for key in LAYER_KEYS:
        node.meta.pop(key, None)
    if LAYER in origin.meta:
        node.meta[LAYER] = origin.meta[LAYER]


def move_role(old: fx.Node, new: fx.Node) -> None:
    """Let `new` be what `old` was in its layer."""
    for key in (ROLE, REPLAY):
        # `pop`, because a role is there once per layer: two nodes of one role are a defect.
        if key in old.meta:
            new.meta[key] = old.meta.pop(key)


def role_nodes(module: fx.GraphModule) -> dict[int, dict[str, fx.Node]]:
    """Return layer -> role -> node, of the operators in the graph and its branches.

    Raises:
        InternalError: two nodes of one layer have one role.
    """
    found: dict[int, dict[str, fx.Node]] = {}
    for layer, role, node in operators_with_roles(module):
        own = found.setdefault(layer, {})
        if role in own:
            raise InternalError(f"layer {layer} has two nodes of role {role}: {own[role].name} and {node.name}")
        own[role] = node
    return dict(sorted(found.items()))


def operators_with_roles(module: fx.GraphModule) -> Iterator[tuple[int, str, fx.Node]]:
    """Yield (layer, role, node) of the operators in the graph and its branches."""
    for owner in with_branches(module):
        for node in owner.graph.nodes:
            layer, role = layer_of(node), role_of(node)
            if node.op == "call_function" and layer is not None and role is not None:
                yield layer, role, node


def assign_layers(graph: fx.Graph, entry: fx.Node, exits: Sequence[fx.Node]) -> None:
    """Write the layer of every operator and parameter of a graph.

    A node belongs to the last layer whose entry it depends on. Two corrections keep equal layers equal: what gathers
    inner values of several layers belongs to none, and what only one layer reads belongs to that layer.

    Args:
        entry: what the first layer reads of the residual stream. exits: the node of role EXIT of each layer.
    """
    # The borders are the residual stream between layers: what lies behind border l belongs to layer l.
    borders = [entry, *exits]
    rank = _ranks(graph, borders)
    # Gathering comes first: a node that it moved behind the layers is no reader that a layer could own.
    _gather_last(graph, borders, rank)
    _sink_into_readers(graph, entry, len(exits), rank)
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr"):
            inside = 1 <= rank[node] <= len(exits)
            node.meta[LAYER] = rank[node] - 1 if inside else None


def _ranks(graph: fx.Graph, borders: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return for every node the number of the last border that it depends on; 0: none."""
    number = {border: i for i, border in enumerate(borders, 1)}
    rank: dict[fx.Node, int] = {}
    for node in graph.nodes:
        # A border itself belongs to the layer in front of it; only what reads it belongs to the next one.
        rank[node] = max((max(rank[a], number.get(a, 0)) for a in node.all_input_nodes), default=0)
    return rank


def _gather_last(graph: fx.Graph, borders: Sequence[fx.Node], rank: dict[fx.Node, int]) -> None:
    """Move nodes that read several layers' inner values, and that no layer needs, behind the last layer."""
    needed, ends = ancestors(*borders), set(borders)
    for node in graph.nodes:
        if node.op != "call_function" or node in needed:
            continue
        # A border is no inner value: every layer reads the border in front of it.
        layers = {rank[a] for a in node.all_input_nodes if a not in ends} - {0}
        if len(layers) > 1 or len(borders) in layers:
            rank[node] = len(borders)


def _sink_into_readers(graph: fx.Graph, entry: fx.Node, layers: int, rank: dict[fx.Node, int]) -> None:
    """Move nodes in front of the first layer, which do not make its entry, into the one layer that reads them."""
    before = ancestors(entry)
    # From the outputs back, so that a chain of nodes in front of a layer moves into it as a whole.
    for node in reversed(graph.nodes):
        if node.op not in ("call_function", "get_attr") or rank[node] != 0 or node in before:
            continue
        readers = {rank[u] for u in node.users}
        if len(readers) == 1 and 1 <= (reader := readers.pop()) <= layers:
            rank[node] = reader


@dataclass(frozen=True)
class Schedule:
    """The operators of a graph by stage: before the layers, one stage per layer, behind them.

    A stage reads only what earlier stages make. Work of a layer that depends on neither tokens nor state, such as
    rotary factors, stands before the layers: there it is shared.
    """

    before: tuple[fx.Node, ...]
    layers: tuple[tuple[fx.Node, ...], ...]
    behind: tuple[fx.Node, ...]


def schedule(graph: fx.Graph) -> Schedule:
    """Return the operators of a graph, in order, by stage. A graph without layer metadata is all `before`."""
    inputs = ("tokens", "inputs_embeds")
    varying = descendants(*(n for n in graph.find_nodes(op="placeholder") if role_of(n) or str(n.target) in inputs))
    # Stage 0 is in front of the layers, stage l + 1 is layer l, and the last stage is behind them.
    count = 1 + max((layer for n in graph.nodes if (layer := layer_of(n)) is not None), default=-1)
    stages: list[list[fx.Node]] = [[] for _ in range(count + 2)]
    stage: dict[fx.Node, int] = {}
    for node in graph.nodes:
        layer = layer_of(node)
        if node.op != "call_function":
            stage[node] = 0
        elif layer is not None:
            stage[node] = layer + 1 if node in varying else 0
        else:
            # An operator of no layer stands behind all layers once it reads what one of them makes.
            stage[node] = count + 1 if any(stage[a] for a in node.all_input_nodes) else 0
        if node.op == "call_function":
            stages[stage[node]].append(node)
    before, *inner, behind = (tuple(s) for s in stages)
    return Schedule(before, tuple(inner), behind)
