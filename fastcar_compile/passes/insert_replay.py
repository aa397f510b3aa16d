"""The FastCar rewrite: score, gate, conditional MLP, caches and chain counters (docs/explanation/replay.md)."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.gates import GATES, Comparison, Gate, GateValues, GateWeights, gate_named
from fastcar_compile.gates.weights import gate_parameter
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, LayerSite, StateRole, StateSpec, graph_module
from fastcar_compile.ir.rewrite import (
    add_placeholder,
    attribute,
    between,
    call,
    node_named,
    output_nodes,
    set_outputs,
)
from fastcar_compile.passes.patterns.earlier_key import earlier_key, reads_earlier_key

aten, fastcar = torch.ops.aten, torch.ops.fastcar
Heads = tuple[tuple[tuple[int, float], ...] | None, ...]


@dataclass(frozen=True)
class InsertReplay(Pass):
    """Make every MLP with a threshold conditional.

    Options:
        thresholds: one per layer; None: this layer never replays and gets no cache.
        max_chain: replays in a row after which a row computes; None: unlimited.
        couple_cfg: rows b and b + B / 2 replay only together.
        gate: name of the gate.
        refresh_every: every row computes in frames that are a multiple of this; None: no such frame.
        heads: per layer (query head, weight) pairs, for a gate that averages over heads; None, or (): all alike.
        gate_weights: of a gate that was trained. As text they are their digest, and a pass from text needs them again.
    """

    name: ClassVar[str] = "insert-replay"
    thresholds: tuple[float | None, ...] = ()
    max_chain: int | None = None
    couple_cfg: bool = False
    gate: str = "tas"
    refresh_every: int | None = None
    heads: Heads = ()
    gate_weights: GateWeights | None = None

    def gate_of(self, layer: int) -> Gate:
        """The layer's gate."""
        weights = None if self.gate_weights is None else self.gate_weights.layer(layer)
        return gate_named(self.gate, self.heads[layer] if self.heads else None, weights)

    def apply(self, program: DecoderProgram) -> bool:
        """Raises CompileError when the options do not fit the program, or when replay is there already."""
        self._check(program)
        writer = _Inserter(program, self)
        for site, threshold in zip(program.sites, self.thresholds, strict=True):
            if threshold is not None:
                gate = self.gate_of(site.layer)
                changes = {"replay": True, "threshold": threshold, "gate": gate.name, "heads": gate.heads}
                if gate.weights is not None:
                    changes["gate_units"] = gate.weights.units
                writer.insert(dataclasses.replace(site, **changes), gate)
        writer.finish()
        return True

    def _check(self, program: DecoderProgram) -> None:
        if "decisions" in program.outputs:
            raise CompileError("insert-replay ran already", hint="name it once in the pipeline")
        if len(self.thresholds) != len(program.sites):
            raise CompileError(f"{len(self.thresholds)} thresholds for {len(program.sites)} layers")
        if self.heads and len(self.heads) != len(program.sites):
            raise CompileError(f"heads of {len(self.heads)} layers for {len(program.sites)} layers")
        for site, heads in zip(program.sites, self.heads, strict=False):
            if wrong := [head for head, _ in heads or () if not 0 <= head < site.num_heads]:
                hint = f"query heads are 0 .. {site.num_heads - 1}"
                raise CompileError(
                    f"layer {site.layer} has no query head {wrong[0]}", where=site.module_path, hint=hint
                )
        self._check_weights(program)
        if self.couple_cfg and program.config.batch_size % 2:
            raise CompileError(
                f"couple_cfg pairs row b with row b + B / 2, but batch_size is {program.config.batch_size}",
                hint="use an even batch_size, or couple_cfg=False",
            )

    def _check_weights(self, program: DecoderProgram) -> None:
        if self.gate_weights is not None:
            self.gate_weights.check([site.hidden for site in program.sites])
        elif self.gate in GATES and GATES[self.gate].takes_weights:
            hint = "give gate_weights=GateWeights.load(file)"
            raise CompileError(f"gate {self.gate!r} needs its weights", where="insert-replay", hint=hint)


class _Inserter:
    def __init__(self, program: DecoderProgram, options: InsertReplay) -> None:
        self.program, self.options = program, options
        self.module, self.graph = program.graph_module, program.graph_module.graph
        self.config = program.config
        self.step = add_placeholder(self.graph, "step", (1,), torch.int64, options.name)
        self.thresholds = add_placeholder(self.graph, "thresholds", (len(program.sites),), torch.float32, options.name)
        self.origin = node_named(self.graph, program.sites[0].region_output)
        with self.graph.inserting_after(self.thresholds):  # one node for all layers, so that graphs grow less with them
            self.each_threshold = self.call(aten.split.Tensor, self.thresholds, 1)
        self.decisions: dict[int, fx.Node] = {}
        self.scores: dict[int, fx.Node] = {}
        self.updates: list[tuple[StateSpec, fx.Node]] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, target, args, origin=self.origin, made_by=InsertReplay.name, **kwargs)

    def insert(self, site: LayerSite, gate: Gate) -> None:
        """Rewrite one layer. Where the gate reads the MLP's input, the norm before it stays outside the branches."""
        self.origin = node_named(self.graph, site.region_output)
        exit_add = node_named(self.graph, site.exit)
        entry = node_named(self.graph, site.mlp_input if gate.caches_input else site.residual)
        cache = self._slots("mlp_cache", site, (site.hidden,), torch.float32)
        chain = self._slots("chain_count", site, (), torch.int32)
        inputs = self._slots("gate_cache", site, (site.hidden,), torch.float32) if gate.caches_input else None
        with self.graph.inserting_before(exit_add):
            x, cached_x = self._input(entry, inputs)
            score = gate.score(self.call, self._values(site, gate, x, cached_x))
            self._check_key(score)
            replay = self._decide(site, gate, score, chain)
            cached = self.call(fastcar.slot_read.default, cache, self.step)
            y = self._conditional(site, entry, replay, cached)
            self._update(cache, StateRole.MLP_CACHE, site, y)
            if inputs is not None:
                kept = self.call(aten.where.self, self.call(aten.unsqueeze.default, replay, 1), cached_x, x)
                self._update(inputs, StateRole.GATE_CACHE, site, kept)
            self._update(chain, StateRole.CHAIN_COUNT, site, self._count(chain, replay))
            shaped = self.call(aten.view.default, y, list(self.origin.meta["val"].shape))
        exit_add.replace_input_with(self.origin, shaped)
        self._erase_region(entry)
        self.decisions[site.layer], self.scores[site.layer] = replay, score
        self.program.sites[site.layer] = site

    def _slots(self, name: str, site: LayerSite, tail: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        shape = (self.config.tokens_per_frame, self.config.batch_size, *tail)
        return add_placeholder(self.graph, f"{name}_{site.layer}", shape, dtype, InsertReplay.name)

    def _input(self, entry: fx.Node, inputs: fx.Node | None) -> tuple[fx.Node | None, fx.Node | None]:
        """The MLP's input and what is cached of it, [B, H]; None where the gate caches nothing."""
        if inputs is None:
            return None, None
        x = self.call(aten.view.default, entry, list(inputs.meta["val"].shape[1:]))
        return x, self.call(fastcar.slot_read.default, inputs, self.step)

    def _values(self, site: LayerSite, gate: Gate, x: fx.Node | None, cached: fx.Node | None) -> GateValues[Any]:
        position, stride = earlier_key(self.graph, self.config, self.origin, InsertReplay.name)
        return GateValues(
            query=node_named(self.graph, site.query),
            key_cache=node_named(self.graph, site.key_cache),
            position=position,
            step=self.step,
            x=x,
            cached=cached,
            stride=stride,
            scale=site.scale,
            layer=site.layer,
            rows=self.config.batch_size,
            params={
                name: attribute(self.module, gate_parameter(name, site.layer), value, self.origin, InsertReplay.name)
                for name, value in gate.params().items()
            },
        )

    def _check_key(self, score: fx.Node) -> None:
        """Raises CompileError where sparse attention came first and its ring drops the key that the score reads."""
        ring, config = self.config.ring, self.config
        if ring is None or not reads_earlier_key(score):
            return
        needed = config.tokens_per_frame + max(config.prefill_chunk, 1)
        if ring.rows < needed:
            what = (
                f"gate {self.options.gate} reads the key of {config.tokens_per_frame} tokens ago, which needs a ring "
                f"of {needed} rows, but sparse-attention made one of {ring.rows}"
            )
            raise CompileError(what, hint="name insert-replay before sparse-attention in the pipeline")

    def _decide(self, site: LayerSite, gate: Gate, score: fx.Node, chain: fx.Node) -> fx.Node:
        threshold = self.call(operator.getitem, self.each_threshold, site.layer)
        limit = -1 if self.options.max_chain is None else self.options.max_chain
        options = (limit, self.options.couple_cfg, self.options.refresh_every or 0)
        at_most = gate.comparison is Comparison.AT_MOST
        frame = self.config.tokens_per_frame
        return self.call(fastcar.gate.default, score, threshold, self.step, chain, frame, *options, at_most)

    def _update(self, state: fx.Node, role: StateRole, site: LayerSite, value: fx.Node) -> None:
        written = self.call(fastcar.slot_write.default, state, value, self.step)
        self.updates.append((self._spec(state, role, site.layer), written))

    def _conditional(self, site: LayerSite, entry: fx.Node, replay: fx.Node, cached: fx.Node) -> fx.Node:
        constants, compute = _compute_branch(entry, self.origin, site)
        keep = _replay_branch(self.module, entry, replay, cached, constants)
        names = (f"replay_branch_{site.layer}", f"compute_branch_{site.layer}")
        branches = []
        for name, branch in zip(names, (keep, compute), strict=True):
            self.module.add_submodule(name, branch)
            branches.append(self.graph.get_attr(name))
        every = self.call(aten.all.default, replay)
        operands = (entry, replay, cached, *constants)
        result = self.graph.call_function(torch.ops.higher_order.cond, (every, *branches, operands))
        result.meta["val"] = (cached.meta["val"],)
        result.meta |= {k: v for k, v in every.meta.items() if k in ("nn_module_stack", "stack_trace", "made_by")}
        return self.call(operator.getitem, result, 0)

    def _count(self, chain: fx.Node, replay: fx.Node) -> fx.Node:
        before = self.call(fastcar.slot_read.default, chain, self.step)
        more = self.call(aten.add.Tensor, before, 1)
        return self.call(aten.mul.Tensor, more, self.call(aten.to.dtype, replay, torch.int32))

    def _erase_region(self, entry: fx.Node) -> None:
        for node in reversed(between(entry, self.origin)):
            if node is not entry and not node.users:
                self.graph.erase_node(node)

    def _spec(self, node: fx.Node, role: StateRole, layer: int) -> StateSpec:
        val = node.meta["val"]
        return StateSpec(str(node.target), tuple(val.shape), val.dtype, role, layer)

    def finish(self) -> None:
        """Stack decisions and scores, and return the new state."""
        outputs = output_nodes(self.graph)
        self.origin = outputs[0]
        with self.graph.inserting_before(self.graph.output_node()):
            decisions = self._stack(self.decisions, torch.bool, False)
            scores = self._stack(self.scores, torch.float32, 0.0)
        set_outputs(self.graph, [outputs[0], decisions, scores, *outputs[1:], *[n for _, n in self.updates]])
        specs = [s for s, _ in self.updates]
        self.program.state += specs
        old = self.program.outputs
        self.program.outputs = [old[0], "decisions", "scores", *old[1:], *[s.name for s in specs]]

    def _stack(self, rows: dict[int, fx.Node], dtype: torch.dtype, fill: float) -> fx.Node:
        batch = self.config.batch_size

        def row(layer: int) -> fx.Node:
            if layer in rows:
                return rows[layer]
            return self.call(aten.full.default, [batch], fill, dtype=dtype)

        layers = len(self.program.sites)
        return self.call(
            aten.view.default, self.call(aten.cat.default, [row(i) for i in range(layers)]), [layers, batch]
        )


def _compute_branch(entry: fx.Node, output: fx.Node, site: LayerSite) -> tuple[list[fx.Node], fx.GraphModule]:
    """The MLP region as a graph of its own over (entry, replay, cached, *constants); returns its constants too."""
    region = [n for n in between(entry, output) if n is not entry]
    inside = set(region)
    constants = sorted({a for n in region for a in n.all_input_nodes if a not in inside and a is not entry})
    graph = fx.Graph()
    values = {entry: _branch_input(graph, "hidden", entry)}
    replay, cached = _gate_inputs(graph, site, entry)
    values |= {c: _branch_input(graph, f"weight_{i}", c) for i, c in enumerate(constants)}
    for node in region:
        values[node] = graph.node_copy(node, lambda n: values[n])
    common = {"origin": output, "made_by": InsertReplay.name}
    rows = call(graph, aten.view.default, (values[output], list(cached.meta["val"].shape)), **common)
    mask = call(graph, aten.unsqueeze.default, (replay, 1), **common)
    graph.output((call(graph, aten.where.self, (mask, cached, rows), **common),))
    return constants, graph_module(torch.nn.Module(), graph)


def _replay_branch(
    module: fx.GraphModule, entry: fx.Node, replay: fx.Node, cached: fx.Node, constants: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    _branch_input(graph, "hidden", entry)
    _branch_input(graph, "replay", replay)
    value = _branch_input(graph, "cached", cached)
    for i, constant in enumerate(constants):
        _branch_input(graph, f"weight_{i}", constant)
    graph.output((call(graph, aten.clone.default, (value,), origin=cached, made_by=InsertReplay.name),))
    return graph_module(torch.nn.Module(), graph)


def _gate_inputs(graph: fx.Graph, site: LayerSite, entry: fx.Node) -> tuple[fx.Node, fx.Node]:
    batch = entry.meta["val"].shape[0]
    template = entry.meta["val"]
    replay, cached = graph.placeholder("replay"), graph.placeholder("cached")
    replay.meta["val"] = template.new_empty((batch,), dtype=torch.bool)
    cached.meta["val"] = template.new_empty((batch, site.hidden))
    return replay, cached


def _branch_input(graph: fx.Graph, name: str, outer: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = dict(outer.meta)
    return node
