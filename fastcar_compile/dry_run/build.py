"""The dry run of a rewritten program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from fastcar_compile.artifact.sections import LayersSection, StateRole
from fastcar_compile.codegen.hls.control import controller_part
from fastcar_compile.codegen.hls.design.banks import bank_map
from fastcar_compile.codegen.hls.design.footprint import capacity, shares_memory
from fastcar_compile.codegen.hls.plan import AcceleratorPlan, footprint_of, plan_accelerator, require_memory
from fastcar_compile.codegen.hls.step_plan import require_step, step_program
from fastcar_compile.config import CompileConfig
from fastcar_compile.dry_run.fallbacks import has_accelerator
from fastcar_compile.dry_run.report import Bank, DryRun, Fallback, Memory, Placement, Problem, Speed
from fastcar_compile.errors import CompileError, attempt
from fastcar_compile.estimate.system import estimate
from fastcar_compile.estimate.workload import workload_of_sections
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


def memory_of(program: DecoderProgram, config: CompileConfig, board: Target, plan: AcceleratorPlan | None) -> Memory:
    """Return the bytes of weights and state, and where they are."""
    totals = {str(role): sum(s.nbytes for s in program.state if s.role is role) for role in StateRole}
    weights = program.params.nbytes()
    return Memory(
        weights=weights,
        state={role: size for role, size in totals.items() if size},
        banks=tuple(_banks(program, config, board, plan)),
    )


def _banks(
    program: DecoderProgram, config: CompileConfig, board: Target, plan: AcceleratorPlan | None
) -> Iterator[Bank]:
    whole = shares_memory(board) or config.offload == "all"
    own = program.params.nbytes() + sum(s.nbytes for s in program.state)
    if plan is None or not whole:
        yield Bank(memory="host", holds="parameters and state", used=own)
    if plan is None:
        return
    name, footprint = " + ".join(m.name for m in board.weight_memories), footprint_of(program, config, board)
    holds = "parameters and state" if whole else "weights"
    yield Bank(memory=name, holds=holds, used=footprint.total, capacity=capacity(board))
    ports = plan.design.axi_weight_ports
    banks = bank_map(board, ports)
    if banks is None or banks.bank_bytes is None:
        return
    section = -(-plan.design.weight_bytes // ports)
    for port, tag in enumerate(banks.weights):
        holds = f"weight streams of port {port}"
        yield Bank(memory=name, tag=tag, holds=holds, used=section, capacity=banks.bank_bytes)


REST = "attention, norms, embedding, residual adds"
NO_KERNEL = "the accelerator has no kernel for them"
WHOLE = "decode step: MLPs, gates, linears, attention, norms, residual adds"


def placements_of(
    program: DecoderProgram, config: CompileConfig, board: Target, plan: AcceleratorPlan | None, kept: list[Fallback]
) -> list[Placement]:
    """Return the parts, the accelerator's first. `kept`: the fallbacks, whose reasons the host's parts repeat."""
    layers = tuple(site.layer for site in program.sites)
    if plan is None:
        return [Placement(what="every part", unit="host", layers=layers, reason=_why_host(board, kept))]
    if config.offload == "all":
        return _whole_step(layers)
    own = tuple(layer for layer, factor in enumerate(plan.table.factors) if factor != 0)
    found = [Placement(what="MLP", unit="accelerator", layers=layers, calls=len(layers), reason="offload")]
    if own:
        found.append(Placement(what="gate", unit="accelerator", layers=own, calls=len(own), reason="offload"))
    found += _calls(plan)
    found += [
        Placement(what=f.what, unit="host", layers=f.layers, reason=f.reason)
        for f in kept
        if f.kind in ("gate", "linear")
    ]
    if config.offload == "mlp":
        found.append(Placement(what="projections and head", unit="host", layers=layers, reason="offload is 'mlp'"))
    found.append(Placement(what=REST, unit="host", layers=layers, reason=NO_KERNEL))
    if program.prefill is not None:
        found.append(Placement(what="prefill", unit="host", layers=layers, reason="the accelerator decodes only"))
    return found


def _whole_step(layers: tuple[int, ...]) -> list[Placement]:
    """Return the parts with offload "all"."""
    reason = "offload is 'all'"
    return [
        Placement(what=WHOLE, unit="accelerator", layers=layers, calls=1, reason=reason),
        Placement(what="prefill", unit="accelerator", layers=layers, reason="a launch for every position of a prompt"),
        Placement(what="embedding", unit="host", reason="it reads one row of a table per token"),
    ]


def _why_host(board: Target, kept: list[Fallback]) -> str:
    """Return why nothing is offloaded."""
    if board.kind != "fpga":
        return f"target {board.name} has no accelerator"
    return next((f.reason for f in kept if f.kind == "accelerator"), "no engine was found: see the problems")


def _calls(plan: AcceleratorPlan) -> Iterator[Placement]:
    """Yield the linear calls by their place in a layer."""
    layers: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for call in plan.calls:
        place = call.name.rpartition(".")[2]
        found = layers.setdefault(place, [])
        counts[place] = counts.get(place, 0) + 1
        if call.layer is not None:
            found.append(call.layer)
    for place, found in layers.items():
        reason = "offload is 'linears'"
        yield Placement(what=place, unit="accelerator", layers=tuple(found), calls=counts[place], reason=reason)
