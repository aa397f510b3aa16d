"""What `compile` would do, without doing it: a typed report of everything that is decided before code generation."""

from __future__ import annotations

import json
import platform
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, field_serializer

from fastcar_compile.artifact.programs import decoder_section, layers_section
from fastcar_compile.artifact.sections import LayerPart, LayersSection, State
from fastcar_compile.artifact.sections.accelerator import ControllerPart, DesignPart, ExplorationPart
from fastcar_compile.artifact.sections.decoder import Part
from fastcar_compile.codegen.hls.control import controller_part
from fastcar_compile.codegen.hls.design.memory import bank_map, capacity, shares_memory
from fastcar_compile.codegen.hls.model.system import estimate
from fastcar_compile.codegen.hls.model.workload import workload_of_sections
from fastcar_compile.codegen.hls.plan import AcceleratorPlan, footprint_of, plan_accelerator, require_memory
from fastcar_compile.codegen.hls.step_plan import require_step, step_program
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.codegen.tvm.emit import cross_compiler
from fastcar_compile.config import CompileConfig
from fastcar_compile.config.formats import ACCELERATED
from fastcar_compile.config.targets import Target, has_accelerator
from fastcar_compile.errors import CompileError, attempt
from fastcar_compile.gates import decided_on_accelerator
from fastcar_compile.ir.layers import layer_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of, where
from fastcar_compile.ir.query import is_op, with_branches
from fastcar_compile.ir.types import DecoderConfig, StateRole
from fastcar_compile.passes.patterns.linear_calls import linear_calls
from fastcar_compile.support.values import checked

# What a dry run says: a typed report, JSON first.


class Fallback(Part):
    """Something that runs in another way than the options ask for.

    Args:
        kind: of part. what: the part of the decoder. layers: where; empty: outside of the layers, or everywhere.
        instead: what happens. reason: why. where: module path or source line. hint: what would avoid it.
    """

    kind: Literal["accelerator", "gate", "linear", "numbers", "offload", "prompt", "library", "assumption"]
    what: str
    layers: tuple[int, ...] = ()
    instead: str
    reason: str
    where: str = ""
    hint: str = ""


class Placement(Part):
    """Where a part of the decode step runs.

    Args:
        layers: of this part; empty: it stands outside of the layers. calls: of the accelerator in one decode step.
        reason: why it runs there.
    """

    what: str
    unit: Literal["accelerator", "host"]
    layers: tuple[int, ...] = ()
    calls: int = 0
    reason: str


class Problem(Part):
    """What `compile` would refuse."""

    what: str
    where: str = ""
    hint: str = ""


class Bank(Part):
    """A memory, or the banks behind one port of it.

    Args:
        memory: its name in the target. tag: the banks, in the linker's words; empty: the whole memory.
        holds: what is there. used, capacity: bytes; capacity None: not known.
    """

    memory: str
    tag: str = ""
    holds: str
    used: int
    capacity: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the content is not larger than the memory."""
        return self.capacity is None or self.used <= self.capacity


class Memory(Part):
    """Bytes: of all parameters, of every role of state, and of every bank."""

    weights: int
    state: dict[str, int]
    banks: tuple[Bank, ...] = ()


class Speed(Part):
    """What the hardware model predicts for the chosen design.

    Args:
        case: "dense", or how much replays. replay_ratio: share of all MLPs that replay.
        bound_by: what takes the largest share of a step.
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
    """What `compile` would do, found without code generation; nothing is written.

    Args:
        options: what was asked for, with the defaults filled in. target: name of the board or CPU.
        decoder: sizes. layers: every layer with module path, source line and gate. pipeline: the passes that ran.
        placements: what runs where. fallbacks: what runs in another way than asked for.
        problems: what `compile` would refuse; empty: it would build the artifact.
        state: what a session keeps from step to step. memory: bytes, per bank of the board.
        design, exploration, controller: the engine that was chosen; None without an accelerator.
        speed: predictions of the hardware model, dense first; empty where there is no engine to model.
    """

    options: CompileConfig
    target: str
    decoder: DecoderConfig
    layers: tuple[LayerPart, ...]
    pipeline: str
    placements: tuple[Placement, ...]
    fallbacks: tuple[Fallback, ...]
    problems: tuple[Problem, ...]
    state: tuple[State, ...]
    memory: Memory
    design: DesignPart | None = None
    exploration: ExplorationPart | None = None
    controller: ControllerPart | None = None
    speed: tuple[Speed, ...] = Field(default=())

    @property
    def ok(self) -> bool:
        """Whether `compile` would build the artifact."""
        return not self.problems

    @field_serializer("options")
    def _options(self, options: CompileConfig) -> dict[str, Any]:
        return options.to_json()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return json.loads(self.model_dump_json())


# What runs in another way than the options ask for, and why.


def fallbacks_of(program: DecoderProgram, config: CompileConfig, board: Target) -> list[Fallback]:
    """Return everything that the rewritten program does in another way than the options ask for."""
    found = list(_unquantised(program, config))
    if has_accelerator(config, board):
        found += _gates(program) if config.offload != "all" else []
        found += _linears(program) if config.offload == "linears" else []
    elif board.kind == "fpga":
        found.append(
            Fallback(
                kind="accelerator",
                what="MLPs",
                layers=tuple(site.layer for site in program.sites),
                instead=f"the CPU of {board.name} computes them: no accelerator kernel is emitted",
                reason=f"the kernels are int8, and quant is {config.quant!r}",
                hint=f"choose quant {' or '.join(ACCELERATED)}",
            )
        )
    if program.prefill is None and config.chunk > 1:
        found.append(
            Fallback(
                kind="prompt",
                what="prompt",
                instead="it goes through the decode step, token by token",
                reason="an exported program holds the decode step alone",
                hint="compile the module itself, or choose a prefill chunk of 1",
            )
        )
    return found + list(_board_libraries(board))


def assumed_frame(frame: int) -> Fallback:
    """Return that nobody said how many tokens a frame has."""
    return Fallback(
        kind="assumption",
        what="tokens_per_frame",
        instead=f"{frame} is assumed",
        reason="the model's config gives none",
        hint="give tokens_per_frame (--tokens-per-frame)",
    )


def refuse_fallbacks(found: list[Fallback]) -> None:
    """Raise CompileError with every fallback and its reason; nothing where there is none."""
    problems = [
        CompileError(f"{f.what}{_layers(f.layers)}: {f.instead}; {f.reason}", where=f.where, hint=f.hint) for f in found
    ]
    if problems:
        raise CompileError.collect(problems)


def _layers(layers: tuple[int, ...]) -> str:
    if not layers:
        return ""
    return f" of layer {layers[0]}" if len(layers) == 1 else f" of layers {', '.join(map(str, layers))}"


def _unquantised(program: DecoderProgram, config: CompileConfig) -> Iterator[Fallback]:
    """Yield the linears whose weights stay float32 although a quantisation was chosen."""
    if config.quant == "none":
        return
    for graph in with_branches(program.graph_module):
        for node in graph.graph.nodes:
            if not is_op(node, torch.ops.aten.linear):
                continue
            layer = layer_of(node)
            yield Fallback(
                kind="numbers",
                what=f"linear {module_path_of(node) or node.name}",
                layers=() if layer is None else (layer,),
                instead="it is computed in float32",
                reason="its weight is computed in the graph, so it cannot be quantised at compile time",
                where=where(node),
                hint="make the weight a parameter of the model, or choose quant 'none'",
            )


def _gates(program: DecoderProgram) -> Iterator[Fallback]:
    """Yield the gates that the host decides."""
    layers: dict[str, list[int]] = defaultdict(list)
    for site in program.sites:
        if site.replay is not None and not decided_on_accelerator(site.replay.gate):
            layers[site.replay.gate].append(site.layer)
    for gate, found in layers.items():
        reason = f"the DRS controller has no unit for gate {gate}"
        hint = "choose one that it has: tas, input_delta, bound, learned"
        place, what = tuple(found), "gate"
        yield Fallback(kind="gate", what=what, layers=place, instead="the host decides", reason=reason, hint=hint)


def _linears(program: DecoderProgram) -> Iterator[Fallback]:
    """Yield the linears that the host keeps with offload="linears"."""
    for linear in linear_calls(program)[1]:
        yield Fallback(
            kind="linear",
            what=f"linear {linear.path}",
            layers=() if linear.layer is None else (linear.layer,),
            instead="the host computes it",
            reason=linear.reason,
            where=linear.path,
            hint="compile with offload mlp, where every linear outside of the MLPs is the host's",
        )


def _board_libraries(board: Target) -> Iterator[Fallback]:
    """Yield that the board's programs cannot be linked here."""
    if board.kind != "fpga":
        return
    compiler = cross_compiler(board.host_triple, f"{platform.machine()}-linux-gnu")
    if shutil.which(compiler) is None:
        yield Fallback(
            kind="library",
            what="host programs of the board",
            instead="they are written as object files, not as a library",
            reason=f"{compiler} is not on PATH",
            hint=f"install it (Debian: g++-{board.host_triple})",
        )


# The dry run of a rewritten program.


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
