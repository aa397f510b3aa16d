"""A dry run of `compile`: a typed report of everything that is decided before code generation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastcar_compile.artifact.accelerator_section import ControllerPart, DesignPart, ExplorationPart
from fastcar_compile.artifact.programs import decoder_section, layers_section
from fastcar_compile.artifact.sections import LayersSection, Part, State
from fastcar_compile.codegen.hls.accelerator import Accelerator
from fastcar_compile.codegen.hls.control import controller_part
from fastcar_compile.codegen.hls.model.system import estimate
from fastcar_compile.codegen.hls.model.workload import workload_of_sections
from fastcar_compile.codegen.plan import BuildPlan, Fallback, Placement, PlannedMemory
from fastcar_compile.config import CompileConfig
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.types import DecoderConfig, LayerSite
from fastcar_compile.support.values import checked


class Problem(Part):
    """A problem that `compile` would refuse."""

    what: str
    where: str = ""
    hint: str = ""


class Speed(Part):
    """A prediction of the hardware model for the chosen design.

    Args:
        case: "dense", or the replay in words. replay_ratio: share of all MLPs that replay.
        bound_by: the part that takes the largest share of a decode step.
    """

    case: str
    replay_ratio: float
    tokens_per_second: float
    seconds_per_step: float
    bandwidth_utilisation: float
    energy_per_token_j: float
    bound_by: str


@checked()
class DryRun(Part):
    """The result of a dry run; no code is generated, and no file is written.

    Args:
        options: the options of `compile`, with the defaults filled in. reasons: option that nobody gave -> why it has
            its value. target: name of the board or CPU.
        decoder: sizes. layers: every layer with module path, source line and gate. pipeline: the passes that ran.
        placements: where each part runs. fallbacks: parts that run in another way than the options ask for.
        problems: problems that `compile` would refuse; empty: it would build the artifact.
        state: states that a session keeps from decode step to decode step. memory: bytes, per bank of the board.
        design, exploration, controller: the engine that was chosen; None without an accelerator.
        speed: predictions of the hardware model, dense first; empty without an engine to model.
    """

    options: CompileConfig
    reasons: dict[str, str]
    target: str
    decoder: DecoderConfig
    layers: tuple[LayerSite, ...]
    pipeline: str
    placements: tuple[Placement, ...]
    fallbacks: tuple[Fallback, ...]
    problems: tuple[Problem, ...]
    state: tuple[State, ...]
    memory: PlannedMemory
    design: DesignPart | None = None
    exploration: ExplorationPart | None = None
    controller: ControllerPart | None = None
    speed: tuple[Speed, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether `compile` would build the artifact."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return json.loads(self.model_dump_json())


def dry_run_of(plan: BuildPlan) -> DryRun:
    """Return the input of code generation, and the predictions of the hardware model."""
    engine = plan.accelerator
    decoder, layers = decoder_section(plan.program), layers_section(plan.program)
    most, cases = replay_ceiling(plan.config, layers), {"dense": 0.0}
    if most > 0:
        cases |= {"half of what may replay": most / 2, "all that may replay": most}
    return DryRun(
        options=plan.config,
        reasons=dict(plan.reasons),
        target=plan.board.name,
        decoder=decoder.config,
        layers=layers.layers,
        pipeline=plan.pipeline,
        placements=plan.placements,
        fallbacks=plan.fallbacks,
        problems=tuple(_problems(plan.problems)),
        state=decoder.state,
        memory=plan.memory,
        design=None if engine is None else engine.design.part,
        exploration=None if engine is None else engine.found.part,
        controller=None if engine is None else controller_part(engine.table),
        speed=() if engine is None else tuple(_speed(plan, engine, cases)),
    )


def _problems(errors: Sequence[CompileError]) -> Iterator[Problem]:
    """Yield every problem; an error that lists several problems gives them one by one."""
    for each in (single for error in errors for single in error.problems or (error,)):
        yield Problem(what=each.what, where=each.where, hint=each.hint)


def _speed(plan: BuildPlan, engine: Accelerator, cases: Mapping[str, float]) -> Iterator[Speed]:
    """Yield the predictions of shares of all MLPs; a decoder that does not fit is predicted as if it did."""
    layers = layers_section(plan.program).layers
    work = workload_of_sections(plan.config, decoder_section(plan.program), layers)
    for case, ratio in cases.items():
        asked = replace(work, replay=ratio)
        result = estimate(asked, plan.board, design=engine.design, program=engine.whole, what_if=bool(plan.problems))
        predicted = {name: getattr(result, name) for name in Speed.model_fields.keys() - {"case", "replay_ratio"}}
        yield Speed(case=case, replay_ratio=ratio, **predicted)


def replay_ceiling(config: CompileConfig, layers: LayersSection) -> float:
    """Return the largest share of all MLPs of a full sequence that may replay.

    The first frame never does; `max_chain` computes every (n + 1)-th visit of a slot, and `refresh_every` every n-th
    frame.
    """
    replay = config.replay
    if replay is None:
        return 0.0
    able = sum(layer.replay is not None for layer in layers.layers) / len(layers.layers)
    forwards = config.max_seq_len - 2  # as in report.json: the first and the last position are not decode steps
    share = able * max(0.0, (forwards - config.tokens_per_frame) / forwards) if forwards > 0 else 0.0
    if replay.max_chain is not None:
        share *= replay.max_chain / (replay.max_chain + 1)
    if replay.refresh_every is not None:
        share *= 1 - 1 / replay.refresh_every
    return share
