"""The dry run of a rewritten program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from fastcar_compile.artifact.sections import LayersSection
from fastcar_compile.codegen.hls.control import controller_part
from fastcar_compile.codegen.hls.plan import AcceleratorPlan, plan_accelerator, require_memory
from fastcar_compile.codegen.hls.step_plan import require_step, step_program
from fastcar_compile.config import CompileConfig
from fastcar_compile.dry_run.fallbacks import has_accelerator
from fastcar_compile.dry_run.memory import memory_of
from fastcar_compile.dry_run.placement import placements_of
from fastcar_compile.dry_run.report import DryRun, Fallback, Problem, Speed
from fastcar_compile.errors import CompileError, attempt
from fastcar_compile.estimate.artifact import workload_of_sections
from fastcar_compile.estimate.system import estimate
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.program_json import decoder_section, layers_section
from fastcar_compile.step.program import StepProgram
from fastcar_compile.targets import Target


@dataclass(frozen=True)
class Rewritten:
    """A program that is ready for code generation.

    Args:
        pipeline: the passes that ran, as text. fallbacks: what runs in another way than asked for.
    """

    program: DecoderProgram
    config: CompileConfig
    board: Target
    pipeline: str
    fallbacks: list[Fallback]


def dry_run_of(rewritten: Rewritten) -> DryRun:
    """Return what code generation would be given, and what the hardware model says of it."""
    program, config, board = rewritten.program, rewritten.config, rewritten.board
    problems: list[CompileError] = []
    plan = step = None
    if has_accelerator(config, board):
        attempt(problems, lambda: require_memory(program, config, board))
        plan = attempt(problems, lambda: plan_accelerator(program, config, board))
        if config.offload == "all" and plan is not None:
            step = attempt(problems, partial(step_program, program, plan))
        elif config.offload == "all":
            attempt(problems, partial(require_step, program))
    decoder, layers = decoder_section(program), layers_section(program)
    return DryRun(
        options=config,
        target=board.name,
        decoder=decoder.config,
        layers=layers.layers,
        pipeline=rewritten.pipeline,
        placements=tuple(placements_of(program, config, board, plan, rewritten.fallbacks)),
        fallbacks=tuple(rewritten.fallbacks),
        problems=tuple(_problems(problems)),
        state=decoder.state,
        memory=memory_of(program, config, board, plan),
        design=None if plan is None else plan.design.part,
        exploration=None if plan is None else plan.found.part,
        controller=None if plan is None else controller_part(plan.table),
        speed=() if plan is None else tuple(_speed(rewritten, plan, step, what_if=bool(problems))),
    )


def _problems(errors: list[CompileError]) -> Iterator[Problem]:
    """Yield every problem, those of an error that lists several one by one."""
    for each in (single for error in errors for single in error.problems or (error,)):
        yield Problem(what=each.what, where=each.where, hint=each.hint)


def _speed(rewritten: Rewritten, plan: AcceleratorPlan, step: StepProgram | None, *, what_if: bool) -> Iterator[Speed]:
    """Yield the predictions, dense first; with `what_if` those of a decoder that does not fit, as if it did."""
    config, layers = rewritten.config, layers_section(rewritten.program)
    if config.offload == "all" and step is None:
        return  # there is no program to predict
    work = workload_of_sections(config, decoder_section(rewritten.program), layers.layers)
    most = replay_ceiling(config, layers)
    cases = {"dense": 0.0}
    if most > 0:
        cases |= {"half of what may replay": most / 2, "all that may replay": most}
    for case, ratio in cases.items():
        asked = replace(work, replay=ratio)
        result = estimate(asked, rewritten.board, design=plan.design, program=step, what_if=what_if)
        yield Speed(
            case=case,
            replay_ratio=ratio,
            tokens_per_second=result.tokens_per_second,
            seconds_per_step=result.seconds_per_step,
            bandwidth_utilisation=result.bandwidth_utilisation,
            energy_per_token_j=result.energy_per_token_j,
            bound_by=result.bound_by,
        )


def replay_ceiling(config: CompileConfig, layers: LayersSection) -> float:
    """Return the largest share of all MLPs of a full sequence that may replay.

    The first frame never does; `max_chain` computes every (n + 1)-th visit of a slot, and `refresh_every` every n-th
    frame.
    """
    replay = config.replay
    if replay is None:
        return 0.0
    able = sum(layer.replay is not None for layer in layers.layers) / len(layers.layers)
    forwards = config.max_seq_len - 2  # as in report.json: of the positions, the first and the last are no decode step
    share = able * max(0.0, (forwards - config.tokens_per_frame) / forwards) if forwards > 0 else 0.0
    if replay.max_chain is not None:
        share *= replay.max_chain / (replay.max_chain + 1)
    if replay.refresh_every is not None:
        share *= 1 - 1 / replay.refresh_every
    return share
