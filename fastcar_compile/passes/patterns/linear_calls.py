"""Which linears of the decode step an accelerator computes besides the MLPs, and in how many calls."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from fastcar_compile.ir.program import DecoderProgram, module_path_of
from fastcar_compile.ir.rewrite import ancestors, is_op, node_arg, node_named

aten, fastcar = torch.ops.aten, torch.ops.fastcar
QUANTISED = (fastcar.linear_w8a8, fastcar.linear_w4a8)


@dataclass(frozen=True)
class LinearCall:
    """Linears that share their input: one call of the accelerator.

    Args:
        name: `layer_<l>.<role>`, or the role alone outside of the layers; also the name of the weight stream.
        layer: index of the decoder layer, or None.
        nodes: the linears in the graph, in order. paths: their module paths.
        weights: attribute paths of their weights before quantisation. biases: the same; all are None or none is.
        inputs: K. channels: N of each.
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
        """Plain values for the manifest: what the call computes, without graph names."""
        return {k: v for k, v in asdict(self).items() if k in ("name", "layer", "paths", "inputs", "channels")}


@dataclass(frozen=True)
class HostLinear:
    """A linear that stays on the host, and why."""

    path: str
    layer: int | None
    reason: str


def linear_calls(program: DecoderProgram) -> tuple[list[LinearCall], list[HostLinear]]:
    """The calls for all linears of the decode step outside of the MLPs, in graph order, and what stays on the host."""
    of_mlps = {name for site in program.sites for name in site.linears}
    places = _places(program)
    groups: dict[tuple[fx.Node, str, bool], list[fx.Node]] = {}
    kept: list[HostLinear] = []
    for node in program.graph_module.graph.nodes:
        if not is_op(node, aten.linear, fastcar.linear_bf16, *QUANTISED) or node.name in of_mlps:
            continue
        role, layer = places.get(node, ("head", None))
        if reason := _reason(node, program.config.batch_size):
            kept.append(HostLinear(module_path_of(node), layer, reason))
        else:
            place = role if layer is None else f"layer_{layer}.{role}"
            groups.setdefault((node.args[0], place, node.args[3] is None), []).append(node)
    calls: list[LinearCall] = []
    for (_, place, _), nodes in groups.items():
        taken = sum(call.name.partition("+")[0] == place for call in calls)
        name = place if not taken else f"{place}+{taken}"
        calls.append(_call(name, places.get(nodes[0], ("head", None))[1], nodes))
    return calls, kept


def _places(program: DecoderProgram) -> dict[fx.Node, tuple[str, int | None]]:
    """Node -> role and layer: the first border that it leads to. What leads to none comes after the last layer."""
    graph = program.graph_module.graph
    borders: list[tuple[str, str, int | None]] = []
    for site in program.sites:
        # What feeds the first layer is no part of it; later layers enter where the one before ends.
        borders += [(site.entry, "input", None)] if site.layer == 0 else []
        borders += [
            (site.attention, "qkv", site.layer),
            (site.residual, "o", site.layer),
            (site.exit, "mlp", site.layer),
        ]
    places: dict[fx.Node, tuple[str, int | None]] = {}
    for name, role, layer in borders:
        for node in ancestors(node_named(graph, name)):
            places.setdefault(node, (role, layer))
    return places


def _reason(node: fx.Node, batch: int) -> str | None:
    """Why this linear stays on the host; None where it does not."""
    if not is_op(node, *QUANTISED):
        return "its weights are not quantised"
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    rows = math.prod(x.shape[:-1])
    if rows != batch:
        return f"it has {rows} row(s), and a call has one for each of the {batch} batch row(s)"
    parameters = [a for a in node.args[1:4] if a is not None]
    if any(a.op != "get_attr" for a in parameters):  # type: ignore[union-attr]
        return "its weights are computed in the graph"
    return None


def _call(name: str, layer: int | None, nodes: list[fx.Node]) -> LinearCall:
    def targets(index: int) -> tuple[Any, ...]:
        return tuple(None if n.args[index] is None else str(n.args[index].target) for n in nodes)  # type: ignore[union-attr]

    weights = [n.args[1].meta["val"] for n in nodes]  # type: ignore[union-attr]
    x = node_arg(nodes[0], 0).meta["val"]
    return LinearCall(
        name=name,
        layer=layer,
        nodes=tuple(n.name for n in nodes),
        paths=tuple(module_path_of(n) for n in nodes),
        weights=tuple(name.removesuffix("_int8").removesuffix("_int4") for name in targets(1)),
        biases=targets(3),
        inputs=int(x.shape[-1]),
        channels=tuple(int(w.shape[0]) for w in weights),
    )
