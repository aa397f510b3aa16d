"""Which linears of the decode step an accelerator computes besides the MLPs, and in how many calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from fastcar_compile.ir.layers import Role, layer_of, parameter_of, role_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of
from fastcar_compile.ir.query import ancestors, is_op, node_arg, optional_arg, shape_of
from fastcar_compile.ir.rewrite import Edit, derived_parameters, replace_call, rewrite_each
from fastcar_compile.ir.sites import LINEARS, QUANTISED_LINEARS
from fastcar_compile.ir.weights import Make

aten = torch.ops.aten


# Linears whose weight is a parameter, and the same linears with the weight in another format.


def _is_plain(node: fx.Node) -> bool:
    """Return whether the node is a linear whose weight is a parameter: neither computed nor transposed in the graph."""
    return is_op(node, aten.linear) and node_arg(node, 1).op == "get_attr"


def replace_linears(
    modules: Iterable[fx.GraphModule], target: Callable[..., Any], suffixes: tuple[str, ...], make: Make, edit: Edit
) -> bool:
    """Replace every plain `linear(x, w, bias)` by `target(x, *make(w), bias)`; return whether there was one.

    The parts that `make` gives of a weight w are called `<w>_<suffix>`. Branches of replay are not searched.
    """

    def replace_one(module: fx.GraphModule, node: fx.Node) -> None:
        with module.graph.inserting_before(node):
            parts = derived_parameters(module, node_arg(node, 1), suffixes, make, edit, origin=node)
        replace_call(node, edit.made_by, target, node_arg(node, 0), *parts, optional_arg(node, 2))

    return rewrite_each(modules, _is_plain, replace_one)


@dataclass(frozen=True)
class LinearCall:
    """Linears that share their input: one call of the accelerator.

    Attributes:
        name: `layer_<l>.<place>`, or the place alone outside of the layers; also the name of the weight stream.
        layer: index of the decoder layer, or None.
        nodes: the linears in the graph, in order.
        paths: their module paths.
        weights: attribute paths of their weights before quantisation.
        biases: attribute paths; all are None or none is.
        inputs: K.
        channels: N of each.
    """

    name: str
    layer: int | None
    nodes: tuple[str, ...]
    paths: tuple[str, ...]
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    inputs: int
    channels: tuple[int, ...]

    @property
    def biased(self) -> bool:
        """Whether the linears have biases."""
        return self.biases[0] is not None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the manifest: what the call computes, without graph names."""
        return {k: v for k, v in asdict(self).items() if k in ("name", "layer", "paths", "inputs", "channels")}


@dataclass(frozen=True)
class HostLinear:
    """A linear that stays on the host, and why."""

    path: str
    layer: int | None
    reason: str


def linear_calls(program: DecoderProgram, before: fx.Node | None = None) -> tuple[list[LinearCall], list[HostLinear]]:
    """Return the calls for all linears of the decode step outside of the MLPs, in graph order, and what stays.

    Args:
        before: a node; linears that it depends on are left out.
    """
    graph = program.graph_module.graph
    places, skipped = _places(graph), set[fx.Node]() if before is None else ancestors(before)
    groups: dict[tuple[fx.Node, str, bool], list[fx.Node]] = {}
    kept: list[HostLinear] = []
    for node in graph.nodes:
        # Linears with a role are those of the MLPs, which offload-mlp has.
        if not is_op(node, *LINEARS) or role_of(node) is not None or node in skipped:
            continue
        if reason := _reason(node, program.config.batch_size):
            kept.append(HostLinear(module_path_of(node), layer_of(node), reason))
        else:
            layer = layer_of(node)
            place = places[node] if layer is None else f"layer_{layer}.{places[node]}"
            # One call has one input, and biases for all of its linears or for none.
            groups.setdefault((node_arg(node, 0), place, node.args[3] is None), []).append(node)
    calls: list[LinearCall] = []
    for (_, place, _), nodes in groups.items():
        # A second call of one place gets a suffix: `layer_0.o+1`.
        taken = sum(call.name.partition("+")[0] == place for call in calls)
        calls.append(_call(place if not taken else f"{place}+{taken}", nodes))
    return calls, kept


def _places(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return node -> where it stands: what it leads to first, of its layer's attention, residual add and exit.

    Outside of the layers it leads to the first of them ("input"), or to none ("head").
    """
    order = ("qkv", "o", "mlp", "input", "head")
    own: dict[str | None, str] = {Role.ATTENTION: "qkv", Role.RESIDUAL: "o", Role.EXIT: "mlp"}
    places: dict[fx.Node, str] = {}
    # From the outputs back, so that the places of a node's readers are known.
    for node in reversed(graph.nodes):
        layer = layer_of(node)
        inside = [places[u] for u in node.users if layer is not None and layer_of(u) == layer]
        if role_of(node) in own:
            inside.append(own[role_of(node)])
        outside = ["head" if places.get(u, "head") == "head" else "input" for u in node.users]
        found = inside if layer is not None else outside
        places[node] = min(found, key=order.index, default="mlp" if layer is not None else "head")
    return places


def _reason(node: fx.Node, batch: int) -> str | None:
    """Return why this linear stays on the host; None where it does not."""
    if not is_op(node, *QUANTISED_LINEARS):
        return "its weights are not quantised"
    rows = math.prod(shape_of(node_arg(node, 0))[:-1])
    if rows != batch:
        return f"it has {rows} row(s), and a call has one for each of the {batch} batch row(s)"
    parameters = [a for a in node.args[1:4] if isinstance(a, fx.Node)]
    if any(a.op != "get_attr" for a in parameters):
        return "its weights are computed in the graph"
    return None


def _call(name: str, nodes: list[fx.Node]) -> LinearCall:
    biases = [optional_arg(n, 3) for n in nodes]
    return LinearCall(
        name=name,
        layer=layer_of(nodes[0]),
        nodes=tuple(n.name for n in nodes),
        paths=tuple(module_path_of(n) for n in nodes),
        weights=tuple(parameter_of(node_arg(n, 1)) for n in nodes),
        biases=tuple(None if b is None else parameter_of(b) for b in biases),
        inputs=shape_of(node_arg(nodes[0], 0))[-1],
        channels=tuple(shape_of(node_arg(n, 1))[0] for n in nodes),
    )
