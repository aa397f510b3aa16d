"""What a decode step with exact numerics is made of, its step program for a design, and the constants that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.control import gate_kind, network_stream, networks_of
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.project import linear_plan
from fastcar_compile.codegen.hls.step_graph import HEAD, LayerParts, StepParts, step_parts
from fastcar_compile.codegen.hls.step_program.builder import (
    NO_WINDOW,
    AttentionPlan,
    CachePlan,
    ReplayPlan,
    StepPlan,
    build_step,
)
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.errors import CompileError, UserError, attempt
from fastcar_compile.gates import decided_on_accelerator
from fastcar_compile.ir.exact import logit_factor
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.patterns.linear_calls import HostLinear, LinearCall

T = TypeVar("T")

_HINT = 'use offload="linears"'


@dataclass(frozen=True)
class StepForm:
    """What a decode step is made of, whatever engine runs it."""

    parts: StepParts
    attention: AttentionPlan
    epsilon: float
    replay: ReplayPlan | None

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the weight streams, in the order of a section."""
        numbers = range(len(self.parts.layers))
        return (*(name for n in numbers for name in (f"layer_{n}.qkv", f"layer_{n}.o", f"layer_{n}")), HEAD)

    def program(self, design: Design) -> StepProgram:
        """Return the step program for a design; values of parameters are not read.

        Raises:
            CompileError: what a step program cannot express.
        """
        numbers = range(len(self.parts.layers))
        step = StepPlan(
            layers=len(numbers),
            rows=design.mlp.batch,
            ports=design.ports,
            hidden=design.mlp.hidden,
            epsilon=self.epsilon,
            attention=self.attention,
            qkv=linear_plan(design.linears["layer_0.qkv"]),
            o=linear_plan(design.linears["layer_0.o"]),
            mlp_words=design.section_words,
            head=linear_plan(design.linears[HEAD]),
            replay=self.replay,
        )
        for place, wanted in (("qkv", step.qkv), ("o", step.o)):
            _only(
                {wanted, *(linear_plan(design.linears[f"layer_{n}.{place}"]) for n in numbers)}, f"the linears {place}"
            )
        try:
            return build_step(step)
        except UserError as error:
            raise CompileError(error.what, hint=_HINT) from error

    def constants(self, program: DecoderProgram) -> NDArray[Any]:
        """Return what the step program reads besides weights and caches, float32 words in the order of `build_step`."""

        def tensor(name: str) -> NDArray[Any]:
            return program.params[name].float().numpy().reshape(-1)

        def of_layer(layer: LayerParts) -> list[NDArray[Any]]:
            names = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
            return [tensor(name) for name in names if name is not None]

        table = self.parts.layers[0].table
        arrays = [a for layer in self.parts.layers for a in of_layer(layer)]
        tables = [] if table is None else [tensor(table)]
        networks = [network_stream(own).view(np.float32) for _, own in sorted(networks_of(program).items())]
        return np.concatenate([*arrays, tensor(self.parts.last_norm), *tables, *networks])


def step_form(program: DecoderProgram, calls: Sequence[LinearCall], kept: Sequence[HostLinear]) -> StepForm:
    """Return the form of a decode step with exact numerics.

    Args:
        calls: the linears outside of the MLPs. kept: those that no engine computes.

    Raises:
        CompileError: everything that a step program cannot express.
    """
    problems = [_refusal(f"the host keeps {linear.path}: {linear.reason}") for linear in kept]
    replay = attempt(problems, lambda: _replay(program))
    parts = attempt(problems, lambda: step_parts(program, {call.name: call for call in calls}))
    attention = epsilon = None
    if parts is not None:
        attention = attempt(problems, lambda: _attention(program, parts))
        epsilon = attempt(problems, lambda: _epsilon(parts))
    if attention is not None:
        wrong = [] if replay is None else replay.problems(len(program.sites), attention)
        problems += [_refusal(text) for text in (*attention.problems(), *wrong)]
    if problems or parts is None or attention is None or epsilon is None:
        raise CompileError.collect(problems)
    return StepForm(parts, attention, epsilon, replay)


def _refusal(reason: str) -> CompileError:
    return CompileError(f"no step program: {reason}", hint=_HINT)


def _epsilon(parts: StepParts) -> float:
    return _only({*(e for layer in parts.layers for e in layer.epsilons), parts.epsilon}, "the norms' epsilons")


def _only(found: set[T], what: str) -> T:
    """Return the one element; more than one cannot be expressed."""
    if len(found) != 1:
        raise _refusal(f"{what} differ: {', '.join(sorted(map(str, found)))}")
    return next(iter(found))


def _attention(program: DecoderProgram, parts: StepParts) -> AttentionPlan:
    layers = parts.layers
    table = _only({layer.table for layer in layers}, "the RoPE tables")
    rows, rotary = (1, 0) if table is None else program.params[table].shape
    found = set[AttentionPlan]()
    for site, layer in zip(program.sites, layers, strict=True):
        own = site.attention
        window = NO_WINDOW if own.window is None else own.window
        cache = CachePlan(own.sinks, own.cache_rows - own.sinks, window)
        factor = float(logit_factor(own.scale))
        heads = (own.num_heads, own.num_kv_heads, own.head_dim)
        found.add(AttentionPlan(*heads, rotary, rows, factor, cache, head_norm=layer.query_norm is not None))
    return _only(found, "the attentions of the layers")


def _replay(program: DecoderProgram) -> ReplayPlan | None:
    """Return the replay of MLPs; None: every layer computes always."""
    found = {site.replay.gate: site for site in program.sites if site.replay is not None}
    foreign = [
        CompileError(
            f"no step program: the host decides gate {gate!r}, and has no part in a step",
            where=site.source,
            hint=_HINT,
        )
        for gate, site in found.items()
        if not decided_on_accelerator(gate)
    ]
    if foreign:
        raise CompileError.collect(foreign)
    networks, layers = networks_of(program), range(len(program.sites))
    units = tuple(len(networks[layer].b1) if layer in networks else 0 for layer in layers if networks)
    gated = tuple(site.replay is not None for site in program.sites)
    return ReplayPlan(program.config.tokens_per_frame, gated, gate_kind(program), units) if any(gated) else None
