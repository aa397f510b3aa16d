"""Score, gate, conditional MLP and caches of the layers that may replay."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.gates import Comparison, Gate, GateValues
from fastcar_compile.gates.weights import gate_parameter
from fastcar_compile.ir.layers import REPLAY, ReplayFacts, Role, mark
from fastcar_compile.ir.program import DecoderProgram, StateRole, StateSpec
from fastcar_compile.ir.query import node_arg, output_nodes, shape_of, value_of
from fastcar_compile.ir.rewrite import add_placeholder, attribute, call, set_outputs
from fastcar_compile.ir.rings import ring_of
from fastcar_compile.ir.sites import attention_site, entry_of, mlp_output, mlp_start
from fastcar_compile.passes.patterns.earlier_key import earlier_key, reads_earlier_key
from fastcar_compile.passes.patterns.replay_cond import ReplayCond

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class GateRules:
    """What holds for the gates of all layers; the options of insert-replay say what they mean."""

    max_chain: int | None
    couple_cfg: bool
    refresh_every: int | None


@dataclass(frozen=True)
class ReplayLayer:
    """One layer that gets a gate."""

    number: int
    threshold: float
    gate: Gate
    nodes: dict[str, fx.Node]

    def added(self) -> fx.Node:
        """What the closing add joins to the residual stream."""
        return mlp_output(self.nodes)

    def entry(self) -> fx.Node:
        """What the compute branch begins with."""
        x, residual = node_arg(self.nodes[Role.UP_PROJ], 0), self.nodes[Role.RESIDUAL]
        if self.gate.caches_input:
            return x
        entry = entry_of(residual, self.nodes[Role.ATTENTION])
        return mlp_start(residual=residual, entry=entry, x=x, output=self.added())

    def facts(self) -> ReplayFacts:
        """What the node of role GATE keeps."""
        units = None if self.gate.weights is None else self.gate.weights.units
        return ReplayFacts(self.threshold, self.gate.name, self.gate.heads, units)


class ReplayInserter:
    """Makes the MLPs of a decode step conditional, one layer after the other; `finish` completes the outputs."""

    def __init__(self, program: DecoderProgram, rules: GateRules, made_by: str) -> None:
        self.program, self.rules, self.made_by, self.config = program, rules, made_by, program.config
        self.module, self.graph = program.graph_module, program.graph_module.graph
        layers = self.config.num_layers
        self.step = add_placeholder(self.graph, "step", (1,), torch.int64, made_by)
        self.thresholds = add_placeholder(self.graph, "thresholds", (layers,), torch.float32, made_by)
        self.origin = output_nodes(self.graph)[0]
        with self.graph.inserting_after(self.thresholds):  # one node for all layers, so that graphs grow less with them
            self.each_threshold = self.shared(aten.split.Tensor, self.thresholds, 1)
        self.decisions: dict[int, fx.Node] = {}
        self.scores: dict[int, fx.Node] = {}
        self.updates: list[tuple[StateSpec, fx.Node]] = []

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, op, args, origin=self.origin, made_by=self.made_by, **kwargs)

    def shared(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call that belongs to no layer."""
        node = self.call(op, *args, **kwargs)
        mark(node, None)
        return node

    def insert(self, layer: ReplayLayer) -> None:
        """Rewrite one layer."""
        self.origin, leave, gate = layer.added(), layer.nodes[Role.EXIT], layer.gate
        width = self.config.hidden_size
        cache = self._slots(StateRole.MLP_CACHE, layer, (width,), torch.float32)
        chain = self._slots(StateRole.CHAIN_COUNT, layer, (), torch.int32)
        inputs = self._slots(StateRole.GATE_CACHE, layer, (width,), torch.float32) if gate.caches_input else None
        # Attention of this layer is done in front of the closing add, so the score may read its query and its keys.
        with self.graph.inserting_before(leave):
            x, cached_x = self._input(layer.entry(), inputs)
            score = gate.score(self.call, self._values(layer, x, cached_x))
            self._check_key(layer, score)
            replay = self._decide(layer, score, chain)
            cached = self.call(fastcar.slot_read.default, cache, self.step)
            cond = ReplayCond(layer.entry(), self.origin, replay, cached, self.made_by)
            y = cond.insert(self.module)
            self._update(cache, StateRole.MLP_CACHE, layer, y)
            if inputs is not None:
                # A row that replays keeps the input of its last computation:
                # the gate compares with what made the cached output.
                kept = self.call(aten.where.self, self.call(aten.unsqueeze.default, replay, 1), cached_x, x)
                self._update(inputs, StateRole.GATE_CACHE, layer, kept)
            self._update(chain, StateRole.CHAIN_COUNT, layer, self._count(chain, replay))
            shaped = self.call(aten.view.default, y, list(shape_of(self.origin)))
        # The branch holds a copy of the region. The original dies once the closing add reads the `cond`.
        leave.replace_input_with(self.origin, shaped)
        cond.erase_region()
        self.decisions[layer.number], self.scores[layer.number] = replay, score

    def _slots(self, role: StateRole, layer: ReplayLayer, tail: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        shape = (self.config.tokens_per_frame, self.config.batch_size, *tail)
        node = add_placeholder(self.graph, f"{role}_{layer.number}", shape, dtype, self.made_by)
        mark(node, layer.number, role)
        return node

    def _input(self, entry: fx.Node, inputs: fx.Node | None) -> tuple[fx.Node | None, fx.Node | None]:
        """The MLP's input and what is cached of it, [B, H]; None where the gate caches nothing."""
        if inputs is None:
            return None, None
        x = self.call(aten.view.default, entry, list(shape_of(inputs)[1:]))
        return x, self.call(fastcar.slot_read.default, inputs, self.step)

    def _values(self, layer: ReplayLayer, x: fx.Node | None, cached: fx.Node | None) -> GateValues[Any]:
        attention = layer.nodes[Role.ATTENTION]
        position, stride = earlier_key(self.config, node_arg(attention, 1), self.origin, self.made_by)
        return GateValues(
            query=node_arg(attention, 0),
            key_cache=node_arg(attention, 1),
            position=position,
            step=self.step,
            x=x,
            cached=cached,
            stride=stride,
            scale=attention_site(attention).scale,
            layer=layer.number,
            rows=self.config.batch_size,
            params={
                name: attribute(self.module, gate_parameter(name, layer.number), value, self.origin, self.made_by)
                for name, value in layer.gate.params().items()
            },
        )

    def _check_key(self, layer: ReplayLayer, score: fx.Node) -> None:
        """Raise CompileError where a ring came first and drops the key that the score reads."""
        ring, config = ring_of(node_arg(layer.nodes[Role.ATTENTION], 1)), self.config
        if ring is None or not reads_earlier_key(score):
            return
        needed = config.tokens_per_frame + max(config.prefill_chunk, 1)
        if ring.rows < needed:
            what = (
                f"gate {layer.gate.name} reads the key of {config.tokens_per_frame} tokens ago, which needs a ring "
                f"of {needed} rows, but an earlier pass made one of {ring.rows}"
            )
            hint = "name insert-replay before sparse-attention and window-caches in the pipeline"
            raise CompileError(what, hint=hint)

    def _decide(self, layer: ReplayLayer, score: fx.Node, chain: fx.Node) -> fx.Node:
        threshold = self.call(operator.getitem, self.each_threshold, layer.number)
        limit = -1 if self.rules.max_chain is None else self.rules.max_chain
        options = (limit, self.rules.couple_cfg, self.rules.refresh_every or 0)
        at_most = layer.gate.comparison is Comparison.AT_MOST
        frame = self.config.tokens_per_frame
        replay = self.call(fastcar.gate.default, score, threshold, self.step, chain, frame, *options, at_most)
        mark(score, layer.number, Role.SCORE)
        mark(replay, layer.number, Role.GATE)
        replay.meta[REPLAY] = layer.facts()
        return replay

    def _update(self, state: fx.Node, role: StateRole, layer: ReplayLayer, value: fx.Node) -> None:
        written = self.call(fastcar.slot_write.default, state, value, self.step)
        spec = StateSpec(str(state.target), shape_of(state), value_of(state).dtype, role, layer.number)
        self.updates.append((spec, written))

    def _count(self, chain: fx.Node, replay: fx.Node) -> fx.Node:
        before = self.call(fastcar.slot_read.default, chain, self.step)
        # (count + 1) * replay: a row that computes starts again at 0.
        more = self.call(aten.add.Tensor, before, 1)
        return self.call(aten.mul.Tensor, more, self.call(aten.to.dtype, replay, torch.int32))

    def finish(self) -> None:
        """Stack decisions and scores, and return the new state."""
        outputs = output_nodes(self.graph)
        self.origin = outputs[0]
        with self.graph.inserting_before(self.graph.output_node()):
            decisions = self._stack(self.decisions, torch.bool, False)
            scores = self._stack(self.scores, torch.float32, 0.0)
        # The nodes here and the names below are in one order: logits, decisions, scores, old state, new state.
        set_outputs(self.graph, [outputs[0], decisions, scores, *outputs[1:], *[n for _, n in self.updates]])
        specs = [s for s, _ in self.updates]
        self.program.state += specs
        old = self.program.outputs
        self.program.outputs = [old[0], "decisions", "scores", *old[1:], *[s.name for s in specs]]

    def _stack(self, rows: dict[int, fx.Node], dtype: torch.dtype, fill: float) -> fx.Node:
        batch, layers = self.config.batch_size, self.config.num_layers
        # A layer without a gate has decisions False and scores 0.
        parts = [
            rows[i] if i in rows else self.shared(aten.full.default, [batch], fill, dtype=dtype) for i in range(layers)
        ]
        return self.shared(aten.view.default, self.shared(aten.cat.default, parts), [layers, batch])
