"""The host graph of an accelerator: gates, MLPs and other linears of the decode step become calls to it."""

import math
import operator
from dataclasses import dataclass

import torch
from torch import fx

from fastcar_compile.gates import decided_on_accelerator
from fastcar_compile.ir.dataflow import ancestors
from fastcar_compile.ir.layers import PROJECTIONS, Role, layer_of, mark, parameter_of, replay_of, role_nodes, role_of
from fastcar_compile.ir.ops.linear import INTEGER_LINEARS
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of
from fastcar_compile.ir.query import bound, is_op, node_arg, node_named, placeholder, shape_of, value_of
from fastcar_compile.ir.rewrite import Inserter, before, replace, replace_call, rewrite_each
from fastcar_compile.ir.sites import LINEARS
from fastcar_compile.passes.caches import reads_earlier_key

aten, fastcar = torch.ops.aten, torch.ops.fastcar


class OffloadGate(Pass):
    """Let the accelerator decide which rows replay; prefill has no gate.

    1. Matches a gate that the controller has a unit for (`decided_on_accelerator`). Any other gate stays on the host,
       and its mask is the Index Register.
    2. Makes `replay, score, count = fastcar.offloaded_gate(query, key_cache, x, cached, counts of this slot, …)` with
       what the score reads; the others are None.
    3. The new chain counts are those of the accelerator.
    So the accelerator decides and the host follows: there is one decision, not two that have to agree. Thresholds, the
    limits on replay, the refresh and the weights of heads are in the accelerator's table; the graph keeps the input
    `thresholds`, unread. Networks of gate `learned` are in its memory.
    """

    name = "offload-gate"
    reason = "Score and gate of the layer are one call of the accelerator's TAS unit."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a gate to offload."""
        return rewrite_each([program.graph_module], _is_offloaded, _offload_gate)


def _is_offloaded(node: fx.Node) -> bool:
    """Return whether the node is a gate whose score the controller computes."""
    facts = replay_of(node) if is_op(node, fastcar.gate) and role_of(node) == Role.GATE else None
    return facts is not None and decided_on_accelerator(facts.gate)


def _offload_gate(_module: fx.GraphModule, gate: fx.Node) -> None:
    score, step, chain = node_arg(gate, 0), node_arg(gate, 2), node_arg(gate, 3)
    # insert-replay counts with `slot_write(chain, (count + 1) * replay, step)`, the one write of these counters.
    (counted,) = (n for n in chain.users if is_op(n, fastcar.slot_write))
    with before(gate, OffloadGate.name) as emit:
        replay, new_score, new_chain = _gate_call(emit, gate, score)
    # The gate goes before the score, which it reads: fx erases only nodes without users.
    replace(gate, replay)
    replace(score, new_score)
    counted.args = (chain, new_chain, step)


def _gate_call(emit: Inserter, gate: fx.Node, score: fx.Node) -> list[fx.Node]:
    step, chain = node_arg(gate, 2), node_arg(gate, 3)
    given = bound(score)
    operands = [given.get(name) for name in ("query", "key_cache", "x", "cached")]
    # A gate that reads no key has no position, and the unit reads no row: `step` fills the place.
    position, stride = (given["position"], given["stride"]) if reads_earlier_key(score) else (step, 0)
    counts = emit(fastcar.slot_read.default, chain, step)
    decided = emit(fastcar.offloaded_gate.default, *operands, counts, position, step, stride, layer_of(gate))
    return [emit(operator.getitem, decided, i) for i in range(3)]


class OffloadMlp(Pass):
    """Let the accelerator compute the MLPs of the decode step; prefill stays on the host.

    1. Matches a layer whose two or three projections are all quantised.
    2. Makes `fastcar.offloaded_mlp(x, replay, cached, layer)` of everything between their input and the last of them.
    3. Inside a replay `cond` the call stands in the compute branch and gets the mask of the rows, so that the
       accelerator is not called when all rows replay. Elsewhere no row replays.
    """

    name = "offload-mlp"
    reason = "The quantised MLP is one call of the accelerator, with the replay decision of every row."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was an MLP to offload."""
        layers = role_nodes(program.graph_module).values()
        found = [[nodes[role] for role in PROJECTIONS if role in nodes] for nodes in layers]
        chosen = [p for p in found if p and all(is_op(n, *INTEGER_LINEARS) for n in p)]
        for first, *_, last in chosen:
            # The norm stays on the host: the call takes what the first projection reads.
            _offload_mlp(node_arg(first, 0), last)
        return bool(chosen)


def _offload_mlp(x: fx.Node, output: fx.Node) -> None:
    graph, shape = output.graph, list(shape_of(output))
    with before(output, OffloadMlp.name) as emit:
        rows = emit(aten.view.default, x, [shape[0], shape[-1]])
        y = emit(fastcar.offloaded_mlp.default, rows, *_replay(emit, shape[0], shape[-1]), layer_of(output))
        mark(y, layer_of(output), Role.MLP)
        output.replace_all_uses_with(emit(aten.view.default, y, shape))
    graph.eliminate_dead_code()
    # The graph may be that of a compute branch, and `run_pipeline` recompiles whole graphs only.
    if graph.owning_module is not None:
        graph.owning_module.recompile()


def _replay(emit: Inserter, batch: int, hidden: int) -> tuple[fx.Node, fx.Node]:
    """The decision and the cached rows: inputs of a compute branch; outside of one, no row replays."""
    if any(n.target == "replay" for n in emit.graph.find_nodes(op="placeholder")):
        return placeholder(emit.graph, "replay"), placeholder(emit.graph, "cached")
    replay = emit(aten.full.default, [batch], False, dtype=torch.bool)
    return replay, emit(aten.full.default, [batch, hidden], 0.0, dtype=torch.float32)


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
        if reason := _kept_for(node, program.config.decode_rows):
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
        calls.append(_linear_call(place if not taken else f"{place}+{taken}", nodes))
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


def _kept_for(node: fx.Node, batch: int) -> str | None:
    """Return why this linear stays on the host; None where it does not."""
    if not is_op(node, *INTEGER_LINEARS):
        return "its weights are not quantised"
    rows = math.prod(shape_of(node_arg(node, 0))[:-1])
    if rows != batch:
        return f"it has {rows} row(s), and a call has one for each of the {batch} batch row(s)"
    parameters = [a for a in node.args[1:4] if isinstance(a, fx.Node)]
    if any(a.op != "get_attr" for a in parameters):
        return "its weights are computed in the graph"
    return None


def _linear_call(name: str, nodes: list[fx.Node]) -> LinearCall:
    biases = [bound(n)["bias"] for n in nodes]
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


class OffloadLinears(Pass):
    """Let the accelerator compute the linears of the decode step outside of the MLPs; prefill stays on the host.

    1. Matches quantised linears with a row for each batch row; `linear_calls` says why others stay.
    2. Linears that share their input, such as q, k and v, become one `fastcar.offloaded_linear`, and slices of it.
    """

    name = "offload-linears"
    reason = "Linears that share their input are one call of the accelerator."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a linear to offload."""
        calls, _ = linear_calls(program)
        for item in calls:
            _offload_linears(program.graph_module.graph, item)
        program.graph_module.graph.eliminate_dead_code()
        return bool(calls)


def _offload_linears(graph: fx.Graph, item: LinearCall) -> None:
    linears = [node_named(graph, name) for name in item.nodes]
    x = node_arg(linears[0], 0)
    # T is 1 in a decode step, so the rows are those of the batch.
    batch, total = value_of(x).numel() // item.inputs, sum(item.channels)
    with before(linears[0], OffloadLinears.name) as emit:
        rows = emit(aten.reshape.default, x, [batch, item.inputs])
        y = emit(fastcar.offloaded_linear.default, rows, item.name, total)
    start = 0
    for linear, channels in zip(linears, item.channels, strict=True):
        # The call stands at the first linear. Each linear's own channels are sliced where the linear was.
        with before(linear, OffloadLinears.name) as emit:
            part = y if channels == total else emit(aten.slice.Tensor, y, 1, start, start + channels)
        replace_call(linear, OffloadLinears.name, aten.reshape.default, part, list(shape_of(linear)))
        start += channels
