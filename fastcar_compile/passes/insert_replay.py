"""The FastCar rewrite: score, gate, conditional MLP, caches and chain counters (docs/explanation/replay.md)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fastcar_compile.errors import CompileError, count_text
from fastcar_compile.gates import GATES, Comparison, Gate, GateValues, GateWeights, gate_named
from fastcar_compile.gates.base import Rotary
from fastcar_compile.gates.weights import gate_parameter
from fastcar_compile.ir.dataflow import between
from fastcar_compile.ir.layers import REPLAY, Role, mark, ring_of, role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.query import graph_module, node_arg, output_nodes, shape_of, value_of
from fastcar_compile.ir.rewrite import (
    Inserter,
    add_placeholder,
    attribute,
    branch_input,
    conditional,
    set_outputs,
)
from fastcar_compile.ir.sites import Rotations, attention_site, entry_of, mlp_output, mlp_start
from fastcar_compile.ir.types import AttentionSite, ReplayFacts, StateRole
from fastcar_compile.passes.caches import earlier_key, reads_earlier_key

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class ReplayCond:
    """What the conditional of one layer is made of.

    Attributes:
        entry: the value that the MLP region begins with, and that stays outside. output: the region's result.
        replay: bool [B], True where a row replays. cached: float32 [B, H].
        made_by: name of the pass.
    """

    entry: fx.Node
    output: fx.Node
    replay: fx.Node
    cached: fx.Node
    made_by: str

    def insert(self, module: fx.GraphModule) -> fx.Node:
        """Insert `cond(replay.all(), replay_branch, compute_branch, …)` and return its result, float32 [B, H].

        The region itself is copied into the compute branch. Once nothing reads its result, it is dead code.
        """
        emit = Inserter(module.graph, self.output, self.made_by)
        constants = self._constants()
        # One row that computes runs the branch for all rows. The rows that replay take the cached value inside of it.
        every = emit(aten.all.default, self.replay)
        branches = {"replay": self._replay_branch(constants), "compute": self._compute_branch(constants)}
        # Both branches take the operands in this order: it is that of `_inputs`.
        operands = [self.entry, self.replay, self.cached, *constants]
        return conditional(emit, module, every, branches, operands, self.cached)

    def _region(self) -> list[fx.Node]:
        return [n for n in between(self.entry, self.output) if n is not self.entry]

    def _constants(self) -> list[fx.Node]:
        """What the region reads besides its entry: parameters."""
        region = self._region()
        inside = {*region, self.entry}
        return sorted({a for n in region for a in n.all_input_nodes if a not in inside})

    def _inputs(self, graph: fx.Graph, constants: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        """The placeholders of a branch: outer node -> inner one."""
        weights = {f"weight_{i}": c for i, c in enumerate(constants)}
        named = {"hidden": self.entry, "replay": self.replay, "cached": self.cached, **weights}
        return {o: branch_input(graph, name, o.meta["val"], o, self.made_by) for name, o in named.items()}

    def _compute_branch(self, constants: Sequence[fx.Node]) -> fx.GraphModule:
        """where(replay, cached, MLP(hidden))."""
        graph = fx.Graph()
        values = self._inputs(graph, constants)
        replay, cached = values[self.replay], values[self.cached]
        for node in self._region():
            values[node] = graph.node_copy(node, lambda n: values[n])
        emit = Inserter(graph, self.output, self.made_by)
        rows = emit(aten.view.default, values[self.output], list(shape_of(cached)))
        graph.output((emit(aten.where.self, emit(aten.unsqueeze.default, replay, 1), cached, rows),))
        return graph_module(torch.nn.Module(), graph)

    def _replay_branch(self, constants: Sequence[fx.Node]) -> fx.GraphModule:
        """A copy of what was cached."""
        graph = fx.Graph()
        # The branch takes parameters that it does not read, because `cond` gives both branches the same operands. It
        # returns a copy, because an output of a branch must not alias an input.
        cached = self._inputs(graph, constants)[self.cached]
        graph.output((Inserter(graph, self.output, self.made_by)(aten.clone.default, cached),))
        return graph_module(torch.nn.Module(), graph)


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
        return ReplayFacts(self.threshold, self.gate.name, self.gate.heads, units, rotary=self.gate.rotary)


class ReplayInserter:
    """Makes the MLPs of a decode step conditional, one layer after the other; `finish` completes the outputs."""

    def __init__(self, program: DecoderProgram, options: InsertReplay) -> None:
        self.program, self.options, self.made_by, self.config = program, options, options.name, program.config
        self.module, self.graph = program.graph_module, program.graph_module.graph
        layers = self.config.num_layers
        self.rotations = Rotations(self.graph)
        self.step = add_placeholder(self.graph, "step", (1,), torch.int64, self.made_by)
        self.thresholds = add_placeholder(self.graph, "thresholds", (layers,), torch.float32, self.made_by)
        self.origin = output_nodes(self.graph)[0]
        with self.graph.inserting_after(self.thresholds):  # one node for all layers, so that graphs grow less with them
            self.each_threshold = self.shared(aten.split.Tensor, self.thresholds, 1)
        self.decisions: dict[int, fx.Node] = {}
        self.scores: dict[int, fx.Node] = {}
        self.updates: list[tuple[StateSpec, fx.Node]] = []

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return Inserter(self.graph, self.origin, self.made_by)(op, *args, **kwargs)

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
            y = ReplayCond(layer.entry(), self.origin, replay, cached, self.made_by).insert(self.module)
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
            query=self._query(layer.gate, attention),
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

    def _query(self, gate: Gate, attention: fx.Node) -> fx.Node:
        """The query that the gate compares, float32 [B, Hq, 1, D]."""
        query = node_arg(attention, 0)
        if not gate.reads_query or gate.rotary == "both":
            return query
        found, swapped = self.rotations.unrotated(attention)
        return self.call(aten.view.default, found, list(shape_of(query))) if swapped else found

    def _check_key(self, layer: ReplayLayer, score: fx.Node) -> None:
        """Raise CompileError where a ring came first and drops the key that the score reads."""
        ring, config = ring_of(node_arg(layer.nodes[Role.ATTENTION], 1)), self.config
        if ring is None or not reads_earlier_key(score):
            return
        needed = config.tokens_per_frame + max(config.prefill_chunk, 1)
        if ring.rows < needed:
            what = f"gate {layer.gate.name} reads the key of {config.tokens_per_frame} tokens ago, which needs a ring "
            what += f"of {needed} rows, but an earlier pass made one of {ring.rows}"
            hint = "name insert-replay before sparse-attention and window-caches in the pipeline"
            raise CompileError(what, hint=hint)

    def _decide(self, layer: ReplayLayer, score: fx.Node, chain: fx.Node) -> fx.Node:
        threshold = self.call(operator.getitem, self.each_threshold, layer.number)
        limit = -1 if self.options.max_chain is None else self.options.max_chain
        options = (limit, self.options.couple_cfg, self.options.refresh_every or 0)
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
        self.graph.eliminate_dead_code()
        specs = [s for s, _ in self.updates]
        self.program.state += specs
        old = self.program.outputs
        self.program.outputs = [old[0], "decisions", "scores", *old[1:], *[s.name for s in specs]]

    def _stack(self, rows: dict[int, fx.Node], dtype: torch.dtype, fill: float) -> fx.Node:
        batch, layers = self.config.batch_size, self.config.num_layers
        # A layer without a gate has decisions False and scores 0.
        parts = [rows.get(i) or self.shared(aten.full.default, [batch], fill, dtype=dtype) for i in range(layers)]
        return self.shared(aten.view.default, self.shared(aten.cat.default, parts), [layers, batch])


Heads = tuple[tuple[tuple[int, float], ...] | None, ...]


@dataclass(frozen=True)
class InsertReplay(Pass):
    """Make every MLP with a threshold conditional, in the decode step.

    1. Matches the layers that find-sites marked. A layer whose threshold is None stays as it is.
    2. Adds the inputs `step` and `thresholds`, and per layer the state mlp_cache, chain_count and, for a gate that
       compares the MLP's input, gate_cache.
    3. Inserts score, gate and `cond(replay.all(), replay_branch, compute_branch)` in front of the closing add.
       The compute branch holds the norm and the MLP; a gate that reads the MLP's input leaves the norm outside.
    4. Returns `decisions` and `scores` of all layers after the logits, and the new state.

    Options:
        thresholds: one per layer; None: this layer never replays and gets no cache.
        max_chain: replays in a row after which a row computes; None: unlimited.
        couple_cfg: rows b and b + B / 2 replay only together.
        gate: name of the gate.
        refresh_every: every row computes in frames that are a multiple of this; None: no such frame.
        heads: per layer (query head, weight) pairs, for a gate that averages over heads; None, or (): all alike.
        rotary: "key": a gate that compares the query with a key takes the query from before its rotary embedding.
        gate_weights: of a gate that was trained. As text they are their digest, and a pass from text needs them again.
    """

    name = "insert-replay"
    reason = "The MLP runs where the gate does not replay; else the output of one frame earlier is taken."
    thresholds: tuple[float | None, ...] = ()
    max_chain: int | None = None
    couple_cfg: bool = False
    gate: str = "tas"
    refresh_every: int | None = None
    heads: Heads = ()
    gate_weights: GateWeights | None = None
    rotary: Rotary = "both"

    def gate_of(self, layer: int) -> Gate:
        """Return the layer's gate."""
        weights = None if self.gate_weights is None else self.gate_weights.layer(layer)
        return gate_named(self.gate, self.heads[layer] if self.heads else None, weights, self.rotary)

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError when the options do not fit the program, or when replay is there already."""
        # All layers are read first: an insertion moves the nodes of its MLP into a branch.
        layers = role_nodes(program.graph_module)
        self._check(program, [attention_site(nodes[Role.ATTENTION]) for nodes in layers.values()])
        writer = ReplayInserter(program, self)
        for layer, threshold in enumerate(self.thresholds):
            if threshold is not None:
                writer.insert(ReplayLayer(layer, threshold, self.gate_of(layer), layers[layer]))
        writer.finish()
        return True

    def _check(self, program: DecoderProgram, attentions: list[AttentionSite]) -> None:
        if "decisions" in program.outputs:
            raise CompileError("insert-replay ran already", hint="name it once in the pipeline")
        layers = count_text(len(attentions), "layer")
        if len(self.thresholds) != len(attentions):
            raise CompileError(f"{count_text(len(self.thresholds), 'threshold')} for {layers}")
        if self.heads and len(self.heads) != len(attentions):
            raise CompileError(f"heads of {count_text(len(self.heads), 'layer')} for {layers}")
        for layer, (attention, heads) in enumerate(zip(attentions, self.heads, strict=False)):
            if wrong := [head for head, _ in heads or () if not 0 <= head < attention.num_heads]:
                hint = f"query heads are 0 .. {attention.num_heads - 1}"
                what = f"layer {layer} has no query head {wrong[0]}"
                raise CompileError(what, where=program.sites[layer].module_path, hint=hint)
        self._check_weights(program)
        if self.couple_cfg and program.config.batch_size % 2:
            what = f"couple_cfg pairs row b with row b + B / 2, but batch_size is {program.config.batch_size}"
            raise CompileError(what, hint="use an even batch_size, or couple_cfg=False")

    def _check_weights(self, program: DecoderProgram) -> None:
        if self.gate_weights is not None:
            self.gate_weights.check([program.config.hidden_size] * program.config.num_layers)
        elif self.gate in GATES and GATES[self.gate].takes_weights:
            hint = "give gate_weights=GateWeights.load(file)"
            raise CompileError(f"gate {self.gate!r} needs its weights", where="insert-replay", hint=hint)
