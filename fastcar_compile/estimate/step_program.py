"""The step program that the compiler would write for a decoder's sizes, and the same without replay."""

from __future__ import annotations

from dataclasses import replace

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import Product
from fastcar_compile.estimate.workload import Workload
from fastcar_compile.exact import logit_factor
from fastcar_compile.step import instructions as step
from fastcar_compile.step.builder import (
    NO_WINDOW,
    AttentionPlan,
    CachePlan,
    LinearPlan,
    ReplayPlan,
    StepPlan,
    build_step,
)
from fastcar_compile.step.instructions import Place
from fastcar_compile.step.program import StepProgram

EPSILON = 1e-5
"""Of the norms of LLaMA-2-7B's config.json; the time of a step does not depend on it."""


def step_program(work: Workload, design: Design) -> StepProgram:
    """Return the step program of a workload on a design.

    Of a decoder without a head, the head is a module of its own: its linear is left out.

    Raises:
        UserError: sizes that no step program has.
    """
    shape, linears, gate = work.shape, design.linears, work.gate
    units = (gate.units,) * shape.layers if gate.units else ()
    head = _linear(linears["head" if shape.head else "layer_0.o"])
    program = build_step(
        StepPlan(
            layers=shape.layers,
            rows=work.batch,
            ports=design.ports,
            hidden=shape.hidden,
            epsilon=EPSILON,
            attention=_attention(work),
            qkv=_linear(linears["layer_0.qkv"]),
            o=_linear(linears["layer_0.o"]),
            mlp_words=design.section_words,
            head=head,
            replay=ReplayPlan(shape.tokens_per_frame, (True,) * shape.layers, gate.kind, units),
        )
    )
    return program if shape.head else replace(program, instructions=tuple(_without_head(program)))


def without_replay(program: StepProgram) -> StepProgram:
    """Return the program of the same decoder compiled without replay."""
    found: list[step.Instruction] = []
    for one in program.instructions:
        if isinstance(one, step.Replay):
            found.append(step.Add(one.layer, one.source, one.target, one.count))
        elif not isinstance(one, step.Decide):
            found.append(one)
    return replace(program, instructions=tuple(found))


def _without_head(program: StepProgram) -> list[step.Instruction]:
    kept = program.instructions
    return [i for i in kept if not (isinstance(i, step.Linear) and i.target is Place.OUTPUT)]


def _linear(product: Product) -> LinearPlan:
    words = product.section_words
    return LinearPlan(product.inputs, product.channels, product.tile, product.tiles, words, bias=product.bias)


def _attention(work: Workload) -> AttentionPlan:
    shape, (sinks, window) = work.shape, work.sink_window or (0, NO_WINDOW)
    cache = CachePlan(sinks, work.cached_rows - sinks, window)
    factor = float(logit_factor(shape.head_dim**-0.5))
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    return AttentionPlan(*heads, shape.head_dim, work.cached_rows, factor, cache)
