"""The FastCar rewrite: TAS, gate, conditional MLP, MLP cache and chain counters (paper section 4, design section 2)."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir import DecoderProgram, LayerSite, StateRole, StateSpec
from fastcar_compile.passes.base import Pass
from fastcar_compile.passes.edit import (
    add_placeholder,
    ancestors,
    call,
    descendants,
    in_order,
    node_named,
    output_nodes,
    placeholder,
    set_outputs,
)

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class InsertReplay(Pass):
    """Make every MLP with a threshold conditional.

    Options:
        thresholds: one per layer; None: this layer never replays and gets no cache.
        max_chain: replays in a row after which a row computes; None: unlimited.
        couple_cfg: rows b and b + B / 2 replay only together.
    """

    name: ClassVar[str] = "insert-replay"
    thresholds: tuple[float | None, ...] = ()
    max_chain: int | None = None
    couple_cfg: bool = False

    def apply(self, program: DecoderProgram) -> bool:
        """Raises CompileError when the options do not fit the program, or when replay is there already."""
        self._check(program)
        writer = _Inserter(program, self)
        for site, threshold in zip(program.sites, self.thresholds, strict=True):
            if threshold is not None:
                writer.insert(dataclasses.replace(site, replay=True, threshold=threshold))
        writer.finish()
        return True

    def _check(self, program: DecoderProgram) -> None:
        if "decisions" in program.outputs:
            raise CompileError("insert-replay ran already", mend="name it once in the pipeline")
        if len(self.thresholds) != len(program.sites):
            raise CompileError(f"{len(self.thresholds)} thresholds for {len(program.sites)} layers")
        if self.couple_cfg and program.config.batch_size % 2:
            raise CompileError(
                f"couple_cfg pairs row b with row b + B / 2, but batch_size is {program.config.batch_size}",
                mend="use an even batch_size, or couple_cfg=False",
            )


class _Inserter:
    def __init__(self, program: DecoderProgram, options: InsertReplay) -> None:
        self.program, self.options = program, options
        self.module, self.graph = program.graph_module, program.graph_module.graph
        self.config = program.config
        self.step = add_placeholder(self.graph, "step", (1,), torch.int64, options.name)
        self.thresholds = add_placeholder(self.graph, "thresholds", (len(program.sites),), torch.float32, options.name)
        self.decisions: dict[int, fx.Node] = {}
        self.scores: dict[int, fx.Node] = {}
        self.updates: list[tuple[StateSpec, fx.Node]] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, target, args, origin=self.origin, made_by=InsertReplay.name, **kwargs)

    def insert(self, site: LayerSite) -> None:
        """Rewrite one layer."""
        self.origin = node_named(self.graph, site.region_output)
        exit_add, residual = node_named(self.graph, site.exit), node_named(self.graph, site.residual)
        cache, chain = self._state(site)
        with self.graph.inserting_before(exit_add):
            replay, score = self._gate(site, chain)
            cached = self.call(fastcar.slot_read.default, cache, self.step)
            y = self._conditional(site, residual, replay, cached)
            written = self.call(fastcar.slot_write.default, cache, y, self.step)
            counted = self._count(chain, replay)
            shaped = self.call(aten.view.default, y, list(self.origin.meta["val"].shape))
        exit_add.replace_input_with(self.origin, shaped)
        self._erase_region(residual)
        self.decisions[site.layer], self.scores[site.layer] = replay, score
        self.updates += [(self._spec(cache, StateRole.MLP_CACHE, site.layer), written)]
        self.updates += [(self._spec(chain, StateRole.CHAIN_COUNT, site.layer), counted)]
        self.program.sites[site.layer] = site

    def _state(self, site: LayerSite) -> tuple[fx.Node, fx.Node]:
        frame, batch, name = self.config.tokens_per_frame, self.config.batch_size, InsertReplay.name
        cache_shape = (frame, batch, site.hidden)
        cache = add_placeholder(self.graph, f"mlp_cache_{site.layer}", cache_shape, torch.float32, name)
        chain = add_placeholder(self.graph, f"chain_count_{site.layer}", (frame, batch), torch.int32, name)
        return cache, chain

    def _gate(self, site: LayerSite, chain: fx.Node) -> tuple[fx.Node, fx.Node]:
        frame, layer = self.config.tokens_per_frame, site.layer
        query, key = node_named(self.graph, site.query), node_named(self.graph, site.key_cache)
        position = placeholder(self.graph, "position")
        score = self.call(fastcar.tas.default, query, key, position, frame, site.scale)
        threshold = self.call(aten.slice.Tensor, self.thresholds, 0, layer, layer + 1)
        limit = -1 if self.options.max_chain is None else self.options.max_chain
        couple = self.options.couple_cfg
        return self.call(fastcar.gate.default, score, threshold, self.step, chain, frame, limit, couple), score

    def _conditional(self, site: LayerSite, residual: fx.Node, replay: fx.Node, cached: fx.Node) -> fx.Node:
        constants, compute = _compute_branch(self.module, residual, self.origin, site)
        keep = _replay_branch(self.module, residual, replay, cached, constants)
        names = (f"replay_branch_{site.layer}", f"compute_branch_{site.layer}")
        branches = []
        for name, branch in zip(names, (keep, compute), strict=True):
            self.module.add_submodule(name, branch)
            branches.append(self.graph.get_attr(name))
        every = self.call(aten.all.default, replay)
        operands = (residual, replay, cached, *constants)
        result = self.graph.call_function(torch.ops.higher_order.cond, (every, *branches, operands))
        result.meta["val"] = (cached.meta["val"],)
        result.meta |= {k: v for k, v in every.meta.items() if k in ("nn_module_stack", "stack_trace", "made_by")}
        return self.call(operator.getitem, result, 0)

    def _count(self, chain: fx.Node, replay: fx.Node) -> fx.Node:
        before = self.call(fastcar.slot_read.default, chain, self.step)
        more = self.call(aten.add.Tensor, before, 1)
        count = self.call(aten.mul.Tensor, more, self.call(aten.to.dtype, replay, torch.int32))
        return self.call(fastcar.slot_write.default, chain, count, self.step)

    def _erase_region(self, residual: fx.Node) -> None:
        for node in reversed(in_order(self.graph, descendants(residual) & ancestors(self.origin))):
            if node is not residual and not node.users:
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

        return self.call(aten.stack.default, [row(i) for i in range(len(self.program.sites))])


def _compute_branch(
    module: fx.GraphModule, residual: fx.Node, output: fx.Node, site: LayerSite
) -> tuple[list[fx.Node], fx.GraphModule]:
    """The MLP region as a graph of its own over (residual, replay, cached, *constants); returns its constants too."""
    outer = module.graph
    region = in_order(outer, (descendants(residual) & ancestors(output)) - {residual})
    inside = set(region)
    constants = in_order(outer, {a for n in region for a in n.all_input_nodes if a not in inside and a is not residual})
    graph = fx.Graph()
    values = {residual: _branch_input(graph, "hidden", residual)}
    replay, cached = _gate_inputs(graph, site, residual)
    values |= {c: _branch_input(graph, f"weight_{i}", c) for i, c in enumerate(constants)}
    for node in region:
        values[node] = graph.node_copy(node, lambda n: values[n])
    common = {"origin": output, "made_by": InsertReplay.name}
    rows = call(graph, aten.view.default, (values[output], list(cached.meta["val"].shape)), **common)
    mask = call(graph, aten.unsqueeze.default, (replay, 1), **common)
    graph.output((call(graph, aten.where.self, (mask, cached, rows), **common),))
    return constants, fx.GraphModule(torch.nn.Module(), graph)


def _replay_branch(
    module: fx.GraphModule, residual: fx.Node, replay: fx.Node, cached: fx.Node, constants: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    _branch_input(graph, "hidden", residual)
    _branch_input(graph, "replay", replay)
    value = _branch_input(graph, "cached", cached)
    for i, constant in enumerate(constants):
        _branch_input(graph, f"weight_{i}", constant)
    graph.output((call(graph, aten.clone.default, (value,), origin=cached, made_by=InsertReplay.name),))
    return fx.GraphModule(torch.nn.Module(), graph)


def _gate_inputs(graph: fx.Graph, site: LayerSite, residual: fx.Node) -> tuple[fx.Node, fx.Node]:
    batch = residual.meta["val"].shape[0]
    template = residual.meta["val"]
    replay, cached = graph.placeholder("replay"), graph.placeholder("cached")
    replay.meta["val"] = template.new_empty((batch,), dtype=torch.bool)
    cached.meta["val"] = template.new_empty((batch, site.hidden))
    return replay, cached


def _branch_input(graph: fx.Graph, name: str, outer: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = dict(outer.meta)
    return node
