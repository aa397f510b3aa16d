"""The step program of a decoder with exact numerics, and the constants that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design.product import Product
from fastcar_compile.codegen.hls.plan import AcceleratorPlan
from fastcar_compile.codegen.hls.step_graph import LayerParts, StepParts, step_parts
from fastcar_compile.drs.table import GateKind
from fastcar_compile.errors import CompileError
from fastcar_compile.exact import logit_factor
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.step.builder import (
    NO_WINDOW,
    AttentionPlan,
    CachePlan,
    LinearPlan,
    ReplayPlan,
    StepPlan,
    build_step,
)
from fastcar_compile.step.program import StepProgram


@dataclass(frozen=True)
class StepSources:
    """A step program and what it reads besides weights and caches.

    Args:
        constants: float32, in the order of `build_step`. streams: names of the weight streams, in the order of a section.
        embedded: the node of the graph that gives the input.
    """

    program: StepProgram
    constants: NDArray[Any]
    streams: tuple[str, ...]
    embedded: str


def step_sources(program: DecoderProgram, plan: AcceleratorPlan) -> StepSources:
    """Return the step program of a decoder whose linears are all on the engine.

    Raises:
        CompileError: what a step program cannot express.
    """
    if plan.kept:
        reason = f"the host keeps {plan.kept[0].path}: {plan.kept[0].reason}"
        raise CompileError(f"no step program: {reason}", hint='use offload="linears"')
    parts = step_parts(program, {call.name: call for call in plan.calls})
    design = plan.design
    step = StepPlan(
        layers=len(parts.layers),
        rows=design.mlp.batch,
        ports=design.ports,
        hidden=design.mlp.hidden,
        epsilon=_only({*(e for layer in parts.layers for e in layer.epsilons), parts.epsilon}, "the norms' epsilons"),
        attention=_attention(program, parts),
        qkv=_linear(design.linears["layer_0.qkv"]),
        o=_linear(design.linears["layer_0.o"]),
        mlp_words=design.section_words,
        head=_linear(design.linears["head"]),
        replay=_replay(program, plan),
    )
    numbers = range(len(parts.layers))
    for number in numbers:
        same = {_linear(design.linears[f"layer_{number}.{place}"]) for place in ("qkv", "o")}
        _only({step.qkv, step.o} | same | {step.qkv}, "the linears of the layers", count=len({step.qkv, step.o}))
    streams = (name for number in numbers for name in (f"layer_{number}.qkv", f"layer_{number}.o", f"layer_{number}"))
    return StepSources(build_step(step), _constants(program, parts), (*streams, "head"), parts.embedded)


def _only(found: set[Any], what: str, count: int = 1) -> Any:
    """Return the one element; more than one cannot be expressed."""
    if len(found) != count:
        raise CompileError(f"no step program: {what} differ: {sorted(map(str, found))}", hint='use offload="linears"')
    return next(iter(found))


def _linear(product: Product) -> LinearPlan:
    words = product.section_words
    return LinearPlan(product.inputs, product.channels, product.tile, product.tiles, words, bias=product.bias)


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


def _replay(program: DecoderProgram, plan: AcceleratorPlan) -> ReplayPlan | None:
    gated = tuple(factor != 0 for factor in plan.table.factors)
    wanted = tuple(site.replay is not None for site in program.sites)
    if gated != wanted or (any(gated) and plan.table.gate is not GateKind.TAS):
        raise CompileError("no step program: its gate is not TAS", hint='use offload="linears"')
    return ReplayPlan(plan.table.tokens_per_frame, gated) if any(gated) else None


def _constants(program: DecoderProgram, parts: StepParts) -> NDArray[Any]:
    """Return the constants in the order that `build_step` documents."""

    def tensor(name: str) -> NDArray[Any]:
        return program.params[name].float().numpy().reshape(-1)

    def of_layer(layer: LayerParts) -> list[NDArray[Any]]:
        names = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        return [tensor(name) for name in names if name is not None]

    table = parts.layers[0].table
    arrays = [a for layer in parts.layers for a in of_layer(layer)]
    return np.concatenate([*arrays, tensor(parts.last_norm), *([] if table is None else [tensor(table)])])
