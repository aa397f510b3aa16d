"""What a decode step with exact numerics is made of, read off its graph, where a step program can express it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from fastcar_compile.codegen.hls.control import gate_kind, network_streams, networks_of
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.spec import DraftSpec, check_drafts
from fastcar_compile.codegen.hls.step_program import builder
from fastcar_compile.codegen.hls.step_program.builder import (
    HEAD,
    AttentionForm,
    CacheForm,
    NormForm,
    ReplayForm,
    only,
    refusal,
)
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.errors import CompileError, attempt
from fastcar_compile.gates import decided_on_accelerator
from fastcar_compile.gates.base import Rotary
from fastcar_compile.ir.exact import logit_factor
from fastcar_compile.ir.layers import Role, parameter_of, role_nodes
from fastcar_compile.ir.ops.linear import INTEGER_LINEARS
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import argument_names, is_op, node_arg, node_named, output_nodes, shape_of, with_branches
from fastcar_compile.ir.sites import branch_operands
from fastcar_compile.ir.types import LayerSite
from fastcar_compile.passes.offload import HostLinear, LinearCall

aten, fastcar = torch.ops.aten, torch.ops.fastcar
HINT = 'use offload="linears"'
ATTENTIONS = (fastcar.exact_attention, fastcar.exact_window_attention)
NORMS = (fastcar.exact_norm, fastcar.exact_layer_norm)
MOVES = (
    aten.view,
    aten.reshape,
    aten.flatten,
    aten.unflatten,
    aten.unsqueeze,
    aten.squeeze,
    aten.transpose,
    aten.permute,
)


@dataclass(frozen=True)
class LayerParts:
    """Parameters of a layer by name.

    Args:
        norms: before attention, before the MLP, then those of q and k, if they have any. table: of RoPE; None: none.
    """

    norms: tuple["NormNode", ...]
    table: str | None


@dataclass(frozen=True)
class DecodeStep:
    """What a decode step is made of, whatever engine runs it.

    Args:
        last_norm: behind the layers. headed: a head follows it. drafts: of its layers.
    """

    layers: tuple[LayerParts, ...]
    last_norm: "NormNode"
    headed: bool
    attention: AttentionForm
    norm: NormForm
    replay: ReplayForm | None
    drafts: tuple[DraftSpec, ...] = ()

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the weight streams, in the order of a section."""
        numbers = range(len(self.layers))
        layers = (name for n in numbers for name in (f"layer_{n}.qkv", f"layer_{n}.o", f"layer_{n}"))
        return (*layers, *([HEAD] if self.headed else []), *(own.name for own in self.drafts))

    def program(self, design: Design) -> StepProgram:
        """Return the step program for a design (`step_program`); values of parameters are not read."""
        return builder.step_program(design, self.attention, self.norm, self.replay)

    def constants(self, program: DecoderProgram) -> NDArray[Any]:
        """Return what the step program reads besides weights and caches, float32 words in the order of `step_program`."""

        def tensor(name: str) -> NDArray[Any]:
            return program.params[name].float().numpy().reshape(-1)

        table = self.layers[0].table
        norms = (*(norm for layer in self.layers for norm in layer.norms), self.last_norm)
        arrays = [tensor(name) for norm in norms for name in norm.parameters]
        tables = [] if table is None else [tensor(table)]
        drafts = [_draft_table(program, own.layer) for own in self.drafts]
        return np.concatenate([*arrays, *tables, network_streams(program), *drafts])


def _draft_table(program: DecoderProgram, layer: int) -> NDArray[Any]:
    """Return what the step program reads of a draft besides its weights: bias, edges, a zero, gains."""
    bias, edges, gains = (program.params[f"draft_{name}_{layer}"].numpy() for name in ("bias", "edges", "gains"))
    return np.concatenate([bias, edges, np.zeros(1, np.float32), gains])


@dataclass(frozen=True)
class NormNode:
    """A norm of `x`. parameters: its weight; of a layer norm, weight and bias."""

    x: fx.Node
    parameters: tuple[str, ...]
    epsilon: float

    @property
    def form(self) -> NormForm:
        """What all norms of a step program have in common."""
        return NormForm(self.epsilon, layer=len(self.parameters) > 1)


def decode_step(program: DecoderProgram, calls: Sequence[LinearCall], kept: Sequence[HostLinear]) -> DecodeStep:
    """Return what a decode step with exact numerics is made of.

    Args:
        calls: the linears outside of the MLPs. kept: those that no engine computes.

    Raises:
        CompileError: everything that a step program cannot express.
    """
    problems = [refusal(f"no step program: the host keeps {linear.path}: {linear.reason}") for linear in kept]
    drafts = drafts_of(program)
    attempt(problems, partial(check_drafts, program.config.decode_rows, drafts))
    replay = attempt(problems, partial(_replay, program))
    parts = attempt(problems, _StepReader(program, {call.name: call for call in calls}).parts)
    if parts is None:
        raise CompileError.collect(problems)
    layers, last = parts
    attention = attempt(problems, partial(_attention, program, layers))
    forms = {norm.form for norm in (*(n for layer in layers for n in layer.norms), last)}
    norm = attempt(problems, partial(only, forms, "the norms"))
    if attention is not None:
        wrong = [] if replay is None else replay.problems(len(program.sites))
        problems += [refusal(f"no step program: {text}") for text in (*attention.problems(), *wrong)]
    if problems or attention is None or norm is None:
        raise CompileError.collect(problems)
    headed = program.config.vocab_size is not None
    return DecodeStep(layers, last, headed, attention, norm, replay, drafts)


def drafts_of(program: DecoderProgram) -> tuple[DraftSpec, ...]:
    """Return the drafts of a decoder's layers."""
    found = {s.layer: s.replay.draft for s in program.sites if s.replay is not None}
    sizes = {layer: size for layer, size in found.items() if size is not None}
    biases = {n for n in sizes if any(f"draft_{name}_{n}" in program.params for name in ("gate_bias", "up_bias"))}
    return tuple(DraftSpec(n, size.neurons, size.rank, n in biases) for n, size in sizes.items())


def _attention(program: DecoderProgram, layers: Sequence[LayerParts]) -> AttentionForm:
    table = only({layer.table for layer in layers}, "the RoPE tables")
    if program.config.ring is not None and (program.config.rows or 1) > 1:
        # Its ring has no room for several rows, as one of a model's own window has (passes.caches.WindowCaches).
        what = "no step program: several rows of a video with sparse attention"
        raise refusal(what, "leave rows and jacobi out, or sparse_attention")
    rows, rotary = (1, 0) if table is None else program.params[table].shape
    found = set[AttentionForm]()
    for site, layer in zip(program.sites, layers, strict=True):
        own = site.attention
        window = builder.NO_WINDOW if own.window is None else own.window
        cache = CacheForm(own.sinks, own.cache_rows - own.sinks, window, program.config.rows or 1)
        factor = float(logit_factor(own.scale))
        heads = (own.num_heads, own.num_kv_heads, own.head_dim)
        found.add(AttentionForm(*heads, rotary, rows, factor, cache, head_norm=len(layer.norms) > 2))
    return only(found, "the attentions of the layers")


def _replay(program: DecoderProgram) -> ReplayForm | None:
    """Return the replay of MLPs; None: every layer computes always."""
    found = {site.replay.gate: site for site in program.sites if site.replay is not None}
    foreign = [
        CompileError(
            f"no step program: the host decides gate {gate!r}, and has no part in a step", where=site.source, hint=HINT
        )
        for gate, site in found.items()
        if not decided_on_accelerator(gate)
    ]
    CompileError.raise_all(foreign)
    networks, layers = networks_of(program), range(len(program.sites))
    units = tuple(len(networks[layer].b1) if layer in networks else 0 for layer in layers if networks)
    gated = tuple(site.replay is not None for site in program.sites)
    if not any(gated):
        return None
    rotary: Rotary = "key" if any(s.replay is not None and s.replay.rotary == "key" for s in program.sites) else "both"
    return ReplayForm(program.config.tokens_per_frame, gated, gate_kind(program), units, rotary)


class _StepReader:
    """Reads the parts off the graph of a decode step; `calls`: the linears outside of the MLPs, by their names.

    Operations that stand where a step program has others or none are CompileErrors: behind the layers, and in a layer.
    """

    def __init__(self, program: DecoderProgram, calls: dict[str, LinearCall]) -> None:
        self.program, self.calls = program, calls
        self.graph = program.graph_module.graph
        self.outer = branch_operands(program.graph_module)
        modules = with_branches(program.graph_module)  # names are unique in a graph, those of linears in all of them
        self.linears = {n.name: n for module in modules for n in module.graph.nodes if is_op(n, *INTEGER_LINEARS)}

    def parts(self) -> tuple[tuple[LayerParts, ...], NormNode]:
        """Return all layers, and the norm behind them. Layers are alike, and so is what is wrong with them: one of them is reported."""
        sites, found, problems = self.program.sites, list[LayerParts](), list[CompileError]()
        last = attempt(problems, self.last)
        for site, before in zip(sites, [None, *sites], strict=False):
            part = attempt(problems, partial(self.layer, site, before))
            if part is None:
                break
            found.append(part)
        if last is None or problems:
            raise CompileError.collect(problems)
        return tuple(found), last

    def last(self) -> NormNode:
        """Return the norm between the last layer and the head, or the output of a decoder without one."""
        out = self.resolved(output_nodes(self.graph)[0])
        if self.program.config.vocab_size is not None:
            out = self.resolved(node_arg(self.expect(out, self.linear(HEAD, 0), "the head"), 0))
        last = self.norm(out)
        self.expect(self.resolved(last.x), self.node(self.program.sites[-1].exit), "the input of the last norm")
        return last

    def layer(self, site: LayerSite, before: LayerSite | None) -> LayerParts:
        """Return the parts of one layer, which reads what the one before it gives."""
        if before is not None:
            self.expect(self.node(site.entry), self.node(before.exit), f"the input of layer {site.layer}")
        entry, residual, leave = (self.node(n) for n in (site.entry, site.residual, site.exit))
        attention = self.node(site.attention.node)
        if not is_op(attention, *ATTENTIONS) or site.parallel:
            raise self.refused(attention if not site.parallel else leave, "attention in exact numerics before the MLP")
        number = f"layer_{site.layer}"
        o = self.linear(f"{number}.o", 0)
        self.expect(self.resolved(node_arg(o, 0)), attention, f"the input of {number}.o")
        self.expect_sum(residual, entry, o)
        self.expect_sum(leave, residual, self.resolved(self.node(site.region_output)))
        first = self.norm(self.resolved(node_arg(self.linear(f"{number}.qkv", 0), 0)))
        self.expect(self.resolved(first.x), entry, f"the input of {number}.qkv")
        second = self.mlp_norm(site, residual)
        query, query_norm, table = self.head(node_arg(attention, 0))
        key, key_norm, key_table = self.head(self.written(node_arg(attention, 1)))
        value = self.resolved(self.written(node_arg(attention, 2)))
        for place, node in enumerate((query, key, value)):
            self.expect(node, self.linear(f"{number}.qkv", place), f"q, k and v of {number}")
        if table != key_table or (query_norm is None) != (key_norm is None):
            raise self.refused(attention, "q and k that have a norm and rotate alike")
        own = tuple(n for n in (query_norm, key_norm) if n is not None)
        return LayerParts((first, second, *own), table)

    def mlp_norm(self, site: LayerSite, residual: fx.Node) -> NormNode:
        """Return the norm between the residual and the MLP, inside of the branch that computes it or before."""
        x = self.computed(node_arg(self.linears[site.mlp.linears[0]], 0))
        found = self.norm(x)
        self.expect(self.computed(found.x), residual, f"the input of the MLP of layer {site.layer}")
        self.check_score(site, x)
        return found

    def computed(self, node: fx.Node) -> fx.Node:
        """Return what a node is where the row computes: rows that replay are zeroed, and the engine leaves them out."""
        node = self.resolved(node)
        # The third operand of `where` is the value of rows that compute; the second is the zero of rows that replay.
        if is_op(node, aten.where) and is_op(self.resolved(node_arg(node, 0)), fastcar.gate):
            node = self.resolved(node_arg(node, 2))
        return node

    def check_score(self, site: LayerSite, x: fx.Node) -> None:
        """Check that a gate reads the q and the key of attention, and the input of the MLP."""
        score = role_nodes(self.program.graph_module)[site.layer].get(Role.SCORE)
        if score is None:
            return
        attention = self.node(site.attention.node)
        query = node_arg(attention, 0)
        if site.replay is not None and site.replay.rotary == "key":
            query = node_arg(self.resolved(query), 0)  # what exact_rotary rotates
        wanted = {"query": query, "key_cache": node_arg(attention, 1), "x": x}
        for name, value in zip(argument_names(score), score.args, strict=False):
            if name in wanted and isinstance(value, fx.Node):
                what = f"{name} of the gate of layer {site.layer}"
                self.expect(self.resolved(value), self.resolved(wanted[name]), what)

    def head(self, node: fx.Node) -> tuple[fx.Node, NormNode | None, str | None]:
        """Return what q or k is made of, its norm and its RoPE table."""
        node, table, norm = self.resolved(node), None, None
        if is_op(node, fastcar.exact_rotary):
            table, node = self.parameter(node_arg(node, 1)), self.resolved(node_arg(node, 0))
        if is_op(node, *NORMS):
            norm = self.norm(node)
            node = self.resolved(norm.x)
        return node, norm, table

    def norm(self, node: fx.Node) -> NormNode:
        """Return the parts of a norm."""
        if not is_op(node, *NORMS):
            raise self.refused(node, "a norm")
        x, *parameters, epsilon = node.args
        own = tuple(self.parameter(p) for p in parameters if isinstance(p, fx.Node))
        assert isinstance(x, fx.Node)
        return NormNode(x, own, epsilon if isinstance(epsilon, float) else 0.0)

    def written(self, cache: fx.Node) -> fx.Node:
        """Return the rows that are written to a cache."""
        if not is_op(cache, fastcar.cache_write, fastcar.ring_write):
            raise self.refused(cache, "the write of one position")
        return node_arg(cache, 1)

    def resolved(self, node: fx.Node) -> fx.Node:
        """Return what a node is, without moves that keep the order of its elements."""
        while True:
            node = self.outer.get(node, node)
            if not is_op(node, *MOVES) or not _keeps_order(node):
                return node
            node = node_arg(node, 0)

    def linear(self, name: str, place: int) -> fx.Node:
        """Return a linear of a call."""
        if name not in self.calls or place >= len(self.calls[name].nodes):
            raise refusal(f"a step program has no linear {name}")
        return self.node(self.calls[name].nodes[place])

    def node(self, name: str) -> fx.Node:
        return node_named(self.graph, name)

    def parameter(self, node: fx.Node) -> str:
        return parameter_of(self.outer.get(node, node))

    def expect(self, node: fx.Node, wanted: fx.Node, what: str) -> fx.Node:
        """Return the node, which is the wanted one."""
        if node is not wanted:
            raise self.refused(node, f"{wanted.name} as {what}")
        return node

    def expect_sum(self, node: fx.Node, left: fx.Node, right: fx.Node) -> None:
        """Check that a node adds two others and nothing else."""
        # A keyword of `add` is `alpha`, a factor that the engine's sum does not have.
        plain = is_op(node, aten.add) and len(node.all_input_nodes) == 2 and not node.kwargs
        if not plain or {self.resolved(n) for n in node.all_input_nodes} != {self.resolved(left), self.resolved(right)}:
            raise self.refused(node, f"the sum of {left.name} and {right.name}")

    def refused(self, node: fx.Node, wanted: str) -> CompileError:
        what = f"a step program has {wanted}, and the decode step has {node.name} ({node.target}) there"
        return CompileError(what, where=where(node), hint=HINT)


def _keeps_order(node: fx.Node) -> bool:
    """Return whether a move leaves the elements in their order: only dimensions of one element change places."""
    if not is_op(node, aten.transpose, aten.permute):
        return True
    before = shape_of(node_arg(node, 0))
    numbers = list(range(len(before)))
    if is_op(node, aten.transpose):
        first, second = (int(str(d)) % len(before) for d in node.args[1:3])
        numbers[first], numbers[second] = numbers[second], numbers[first]
    else:
        order = node.args[1]
        numbers = [int(str(d)) % len(before) for d in order] if isinstance(order, list | tuple) else numbers
    # An axis of one element may stand anywhere: it does not change the order in memory.
    large = [d for d in numbers if before[d] != 1]
    return large == sorted(large)
