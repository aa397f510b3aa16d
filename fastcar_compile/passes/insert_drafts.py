"""A row that replays gets a draft's output, with what is left of the cached one (docs/explanation/drafts.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.errors import CompileError
from fastcar_compile.gates.draft import Draft, LayerDraft
from fastcar_compile.ir.dataflow import ancestors, in_order
from fastcar_compile.ir.layers import REPLAY, Role, layer_of, replay_of, role_nodes, role_of
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import bound, branches_of, graph_module, is_op, node_arg, tensor_attribute
from fastcar_compile.ir.rewrite import Inserter, attribute, before, branch_input, conditional, fake_like
from fastcar_compile.ir.types import StateRole
from fastcar_compile.passes.quantize import stored_like

aten, fastcar = torch.ops.aten, torch.ops.fastcar
_LINEARS = ("gate_proj", "up_proj", "inner", "outer")


@dataclass(frozen=True)
class MlpNodes:
    """The MLP of a layer as a draft imitates it: its linears and what lies between them."""

    firsts: dict[str, fx.Node]
    down: fx.Node

    @classmethod
    def of(cls, nodes: Mapping[str, fx.Node]) -> MlpNodes:
        """Return the MLP of a layer's nodes by role."""
        return cls({str(r): nodes[r] for r in (Role.GATE_PROJ, Role.UP_PROJ) if r in nodes}, nodes[Role.DOWN_PROJ])

    def hidden(self, linears: Mapping[str, fx.Node], emit: Inserter) -> fx.Node:
        """Copy the activation, and the product of a gated MLP, behind other linears; return the result."""
        values = {self.firsts[role]: linear for role, linear in linears.items()}
        last = node_arg(self.down, 0)
        own = ancestors(last, until=set(self.firsts.values())) | {last}
        for node in in_order(self.down.graph, own - values.keys()):
            if node.op != "call_function" or not set(node.all_input_nodes) <= values.keys():
                hint = "compile without the draft, or leave this layer out of it"
                raise error_at(node, "a draft imitates an activation between two linears, and no other MLP", hint)
            args = cast("tuple[Any, ...]", map_arg(node.args, values.__getitem__))
            values[node] = emit(cast("Callable[..., Any]", node.target), *args, **node.kwargs)
        return values[last]


@dataclass(frozen=True)
class DraftBranch:
    """The graph of one layer's draft: (x, cached_x, cached, rows, weights …) -> the outputs of the rows that replay.

    It has no sizes of its own, so that it computes any number of rows.

    Attributes:
        module: the graph. weights: name -> tensor of its last operands, in order.
    """

    module: fx.GraphModule
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, mlp: MlpNodes, draft: LayerDraft, batch: int, zero: bool = False) -> DraftBranch:
        """Return the branch of a draft in the number format of the MLP.

        Args:
            batch: B, of x, cached_x and cached float32 [B, H] and of rows bool [B]: those that get the result.
            zero: the other rows are zero from the start, and kernels do not multiply rows of zeros.
        """
        graph, weights, origin, made_by = fx.Graph(), dict[str, Tensor](), mlp.down, InsertDrafts.name
        row = torch.empty(batch, draft.up_proj.shape[1], device="meta")
        rows = {"x": row, "cached_x": row, "cached": row, "rows": row[:, 0].bool()}
        fakes = {name: fake_like(mlp.down.graph, value) for name, value in rows.items()}
        values = {name: branch_input(graph, name, fake, origin, made_by) for name, fake in fakes.items()}
        emit, inputs = Inserter(graph, origin, made_by), dict[str, list[fx.Node]]()
        for name, tensor in draft.params().items():
            parts = stored_like(mlp.down, tensor, f"the draft's {name}")[1] if name in _LINEARS else {"": tensor}
            weights |= {f"{name}{suffix}": part for suffix, part in parts.items()}
            own = [(f"{name}{suffix}", fake_like(mlp.down.graph, part)) for suffix, part in parts.items()]
            inputs[name] = [branch_input(graph, n, fake, origin, made_by) for n, fake in own]
        linear_op = stored_like(mlp.down, draft.up_proj, "the draft's up_proj")[0]

        def linear(name: str, x: fx.Node, bias: str = "") -> fx.Node:
            return emit(linear_op, x, *inputs[name], inputs[bias][0] if bias in inputs else None)

        x, cached_x = values["x"], values["cached_x"]
        if zero:
            away = emit(aten.unsqueeze.default, values["rows"], 1)
            none = emit(aten.full.default, [1], 0.0, dtype=torch.float32)
            x, cached_x = (emit(aten.where.self, away, v, none) for v in (x, cached_x))
        gain = emit(fastcar.draft_gain.default, x, cached_x, inputs["edges"][0], inputs["gains"][0])
        both = emit(aten.cat.default, [x, cached_x])
        biases = {"gate_proj": "gate_bias", "up_proj": "up_bias"}
        hidden = mlp.hidden({role: linear(role, both, biases[role]) for role in mlp.firsts}, emit)
        features = emit(aten.cat.default, [hidden, linear("inner", both)], 1)
        # m(x) - g m(x_c) is one product: outer is linear, so the gain is applied in front of it.
        left = linear("outer", emit(fastcar.draft_difference.default, features, gain))
        graph.output((emit(fastcar.draft_sum.default, left, values["cached"], inputs["bias"][0], gain),))
        return cls(graph_module(torch.nn.Module(), graph), weights)

    def __call__(self, x: Tensor, cached_x: Tensor, cached: Tensor) -> Tensor:
        """Return the outputs float32 [B, H] of rows that all replay."""
        (found,) = self.module(x, cached_x, cached, x.new_ones(len(x), dtype=torch.bool), *self.weights.values())
        return found


@dataclass(frozen=True)
class _Replayed:
    """What insert-replay made of a layer, as far as a draft changes it.

    Attributes:
        decision: bool [B]. x, cached_x: the MLP's input, and that of the slot's last computed visit, float32 [B, H].
        cached: the output of that visit. cond: the layer's conditional. written: the write of its result.
    """

    decision: fx.Node
    x: fx.Node
    cached_x: fx.Node
    cached: fx.Node
    cond: fx.Node
    written: fx.Node

    @classmethod
    def of(cls, module: fx.GraphModule, decision: fx.Node) -> _Replayed:
        """Return the nodes of the layer that a decision is of."""
        states = {role_of(n): n for n in module.graph.find_nodes(op="placeholder") if layer_of(n) == layer_of(decision)}
        read, written = _slot(states[StateRole.MLP_CACHE])
        cached_x, kept = _slot(states[StateRole.GATE_CACHE])
        # insert-replay writes where(replay, cached_x, x) to the cache of inputs.
        x = node_arg(node_arg(kept, 1), 2)
        (cond,) = (n for n in read.users if n.target is torch.ops.higher_order.cond)
        return cls(decision, x, cached_x, read, cond, written)


def _slot(state: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return what reads and what writes a cache of one frame."""
    (read,) = (n for n in state.users if is_op(n, fastcar.slot_read))
    (written,) = (n for n in state.users if is_op(n, fastcar.slot_write))
    return read, written


@dataclass(frozen=True)
class InsertDrafts(Pass):
    """Give rows that replay the output of a draft, a small surrogate of the MLP.

    1. Matches the layers that insert-replay made conditional with a gate that keeps the MLP's input, and that have a
       draft.
    2. Inserts `drafted = cond(no row replays, keep_branch, draft_branch)` in front of the layer's `cond`, which takes
       it in the place of the cached output. Rows that compute are zero in the branch, and kernels do not multiply them.
    3. The cache of outputs is written only where a row computes, as that of inputs is.

    Options:
        draft: of the decoder's layers. As text it is its digest, and a pass from text needs the file again.
    """

    name = "insert-drafts"
    reason = "A row that replays gets a small surrogate of the MLP, and what the surrogate leaves of the cached output."
    draft: Draft | None = None

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError where the draft does not fit the decoder, or there is no replay to change."""
        if self.draft is None:
            return False
        layers, config = role_nodes(program.graph_module), program.config
        self.draft.check([config.hidden_size] * len(layers))
        gates = (n for n in program.graph_module.graph.nodes if is_op(n, fastcar.gate))
        alone = config.batch_size // (2 if any(bound(n)["couple_cfg"] for n in gates) else 1) == 1
        modified = False
        facts = [replay_of(nodes[Role.GATE]) for nodes in layers.values() if Role.GATE in nodes]
        if any(f is not None and f.draft is not None for f in facts):
            raise CompileError("insert-drafts ran already", hint="name it once in the pipeline")
        for layer, draft in self.draft.layers.items():
            if Role.GATE in layers[layer]:
                self._insert(program, layers[layer], draft, alone)
                modified = True
        if not modified:
            raise CompileError("no layer with a draft has a gate", hint="name insert-drafts behind insert-replay")
        program.graph_module.graph.eliminate_dead_code()
        return True

    def _insert(self, program: DecoderProgram, nodes: dict[str, fx.Node], draft: LayerDraft, alone: bool) -> None:
        module = program.graph_module
        found = _Replayed.of(module, nodes[Role.GATE])
        facts, layer = replay_of(found.decision), layer_of(found.decision)
        assert facts is not None
        with before(found.cond, self.name, origin=nodes[Role.EXIT]) as emit:
            # A row that is not there counts as replaying, so that others decide whether the MLP runs; here it does not.
            rows = found.decision
            if not alone:
                there = emit(aten.ge.Scalar, bound(rows)["step"], 0)
                rows = emit(aten.logical_and.default, rows, there)
            operands = {"x": found.x, "cached_x": found.cached_x, "cached": found.cached, "rows": rows}
            branch = DraftBranch.of(MlpNodes.of(nodes), draft, program.config.batch_size, zero=not alone)
            weights = {
                name: attribute(module, f"draft_{name}_{layer}", tensor, nodes[Role.EXIT], self.name)
                for name, tensor in branch.weights.items()
            }
            branches = {"draft": branch.module, "keep": _keep({**operands, **weights}, emit)}
            if alone:  # some row replays where every row does, which the layer's own conditional asks, too
                condition = node_arg(found.cond, 0)
            else:
                condition = emit(aten.all.default, emit(aten.logical_not.default, rows))
                branches = dict(reversed(branches.items()))
            drafted = conditional(
                emit, module, condition, branches, [*operands.values(), *weights.values()], found.cached
            )
        found.cond.replace_input_with(found.cached, drafted)
        with before(found.written, self.name) as emit:
            mask = emit(aten.unsqueeze.default, found.decision, 1)
            found.written.update_arg(1, emit(aten.where.self, mask, found.cached, node_arg(found.written, 1)))
        found.decision.meta[REPLAY] = replace(facts, draft=draft.size)


def drafts_of(program: DecoderProgram, draft: Draft) -> list[DraftBranch | None]:
    """Return the draft of every layer, as a function; None: the layer replays plainly.

    Args:
        draft: with its layers; or its digest alone, for a program in which insert-drafts ran.
    """
    if not draft.layers:
        return _inserted(program.graph_module, program.config.num_layers)
    draft.check([program.config.hidden_size] * program.config.num_layers)
    layers = role_nodes(program.prefill or program.graph_module)
    return [
        DraftBranch.of(MlpNodes.of(nodes), draft.layers[i], 1) if i in draft.layers else None
        for i, nodes in layers.items()
    ]


def spared_of(program: DecoderProgram, draft: Draft | None) -> tuple[float, ...]:
    """Return what share of its MLP's weights each layer does not read where it replays. draft: as for `drafts_of`."""
    gates, found = role_nodes(program.graph_module), list[float]()
    own = dict[int, LayerDraft]() if draft is None else draft.layers
    for layer, nodes in role_nodes(program.prefill or program.graph_module).items():
        facts = replay_of(gates[layer][Role.GATE]) if Role.GATE in gates[layer] else None
        size = own[layer].size if layer in own else None if facts is None or own else facts.draft
        up = nodes[Role.UP_PROJ]
        found.append(1 - size.share(up.meta["val"].shape[-1], Role.GATE_PROJ in nodes) if size else 1.0)
    return tuple(found)


def _inserted(module: fx.GraphModule, layers: int) -> list[DraftBranch | None]:
    found: list[DraftBranch | None] = [None] * layers
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond):
        _, *arms, operands = node.args
        layer, name = layer_of(node), f"draft_branch_{layer_of(node)}"
        if layer is not None and name in (str(arm.target) for arm in arms):
            weights = {str(n.target): tensor_attribute(module, str(n.target)) for n in operands[4:]}
            found[layer] = DraftBranch(branches_of(module)[name], weights)
    return found


def _keep(operands: Mapping[str, fx.Node], emit: Inserter) -> fx.GraphModule:
    """A copy of what was cached, where no row replays."""
    graph = fx.Graph()
    inner = {n: branch_input(graph, n, outer.meta["val"], emit.origin, emit.made_by) for n, outer in operands.items()}
    graph.output((Inserter(graph, emit.origin, emit.made_by)(aten.clone.default, inner["cached"]),))
    return graph_module(torch.nn.Module(), graph)
