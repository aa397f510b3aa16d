"""What a build will be: decided once, from the program and the options, before a file is written."""

import platform
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from fastcar_compile.artifact.programs import decoder_section, layers_section
from fastcar_compile.artifact.sections import Part
from fastcar_compile.codegen.hls import accelerator as engines
from fastcar_compile.codegen.hls.accelerator import Accelerator, Offloaded, offloaded
from fastcar_compile.codegen.hls.design.memory import bank_map, capacity
from fastcar_compile.codegen.hls.model import default_offload
from fastcar_compile.codegen.hls.model.workload import workload_of_sections
from fastcar_compile.codegen.tvm.isa import cross_compiler
from fastcar_compile.config import CompileConfig
from fastcar_compile.config.formats import ACCELERATED
from fastcar_compile.config.resolve import Resolved
from fastcar_compile.config.targets import Target, has_accelerator
from fastcar_compile.errors import CompileError, UserError, attempt
from fastcar_compile.gates import decided_on_accelerator
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.ir.layers import layer_of
from fastcar_compile.ir.pass_manager import Pass, pipeline_to_string, run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of, where
from fastcar_compile.ir.query import is_op, with_branches
from fastcar_compile.ir.types import StateRole
from fastcar_compile.passes.pipeline import rewrite_pipeline
from fastcar_compile.support.values import warn


class Fallback(Part):
    """Something that runs in another way than the options ask for.

    Args:
        kind: of part. what: the part of the decoder. layers: where; empty: outside of the layers, or everywhere.
        instead: what happens. reason: why. where: module path or source line. hint: what would avoid it.
    """

    kind: Literal["accelerator", "gate", "draft", "linear", "numbers", "offload", "prompt", "library", "assumption"]
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


class PlannedMemory(Part):
    """Bytes: of all parameters, of every role of state, and of every bank."""

    weights: int
    state: dict[str, int]
    banks: tuple[Bank, ...] = ()


@dataclass(frozen=True)
class BuildPlan:
    """What a build will be. The dry run prints it, the emitters follow it, and the manifest stores what a device needs.

    Args:
        program: rewritten for `config`. config: the options, with what the accelerator computes. board: the target.
        reasons: option that nobody gave -> why it has its value.
        pipeline: the passes that ran, as text.
        accelerator: its engine and its work; None: no kernel is emitted, or none can be (`problems`).
        placements: what runs where, and why. memory: bytes, per bank of the board.
        fallbacks: what runs in another way than asked for. problems: why there will be no artifact.
    """

    program: DecoderProgram
    config: CompileConfig
    reasons: Mapping[str, str]
    board: Target
    pipeline: str
    accelerator: Accelerator | None
    placements: tuple[Placement, ...]
    memory: PlannedMemory
    fallbacks: tuple[Fallback, ...]
    problems: tuple[CompileError, ...]

    def require_buildable(self) -> None:
        """Raise CompileError with everything that stands against an artifact."""
        CompileError.raise_all(self.problems)

    def require_no_fallback(self) -> None:
        """Raise CompileError with every fallback and its reason."""
        problems = [
            CompileError(f"{f.what}{_layers(f.layers)}: {f.instead}; {f.reason}", where=f.where, hint=f.hint)
            for f in self.fallbacks
        ]
        CompileError.raise_all(problems)


def decide(
    program: DecoderProgram,
    asked: Resolved,
    board: Target,
    *,
    original: DecoderProgram | None = None,
    before: Sequence[Pass] = (),
) -> BuildPlan:
    """Rewrite a program and return the plan of its build.

    Args:
        program: with known layers; it is rewritten. original: a copy of it, needed where `asked` has whole steps to
            try. They are taken if the program allows it, and if the hardware model predicts no shorter dense step with
            the linears alone. A refusal is a fallback, and a warning too.
        asked: the options. before: the passes that ran already.

    Raises:
        CompileError: the program cannot be rewritten with the options.
    """
    refused = list[Fallback]()
    if asked.whole is not None and original is not None:
        try:
            passes = rewritten(program, asked.whole)
            work = offloaded(program, asked.whole.offload)
        except CompileError as error:
            # Nobody asked for whole steps, but everybody would like them.
            instead, hint = "the accelerator computes its MLPs, the host the rest", "give offload='mlp' (--offload mlp)"
            reason = "; ".join(dict.fromkeys(single.what for single in error.problems or (error,)))
            refused.append(Fallback(kind="offload", what="decode step", instead=instead, reason=reason, hint=hint))
            asked = asked.offloading("mlp", "whole steps cannot express the decoder: see the fallbacks")
        else:
            whole = asked.offloading("all", "the hardware model predicts no shorter dense step with the linears alone")
            plan = _plan(program, whole, board, [*before, *passes], work)
            if _best_offload(plan) == "all":
                return plan
            asked = asked.offloading("linears", "the hardware model predicts a shorter dense step than of whole steps")
        program = original.copied()
    passes = rewritten(program, asked.config)
    for fallback in refused:  # not before it is certain that there is something to fall back to
        text = f"offload is 'mlp', because the accelerator cannot run this decoder's whole steps: {fallback.reason}"
        warn(text, 4)
    plan = _plan(program, asked, board, [*before, *passes])
    return replace(plan, fallbacks=(*refused, *plan.fallbacks))


def rewritten(program: DecoderProgram, config: CompileConfig) -> list[Pass]:
    """Rewrite a program as the options say, and return the passes that ran."""
    passes = rewrite_pipeline(config, len(program.sites))
    run_pipeline(program, passes)
    return passes


def _best_offload(plan: BuildPlan) -> str:
    """Return the faster offload of a plan for whole steps; "all" where the layers differ in size."""
    try:
        layers = layers_section(plan.program).layers
        work = workload_of_sections(plan.config, decoder_section(plan.program), layers)
    except UserError:
        return "all"
    own = plan.accelerator
    return default_offload(work, plan.board, whole=None if own is None else (own.design, own.whole))


def _plan(
    program: DecoderProgram, asked: Resolved, board: Target, passes: Sequence[Pass], work: Offloaded | None = None
) -> BuildPlan:
    """Return the plan of a rewritten program. `work`: of the accelerator, where it is known already."""
    config, problems, accelerator = asked.config, list[CompileError](), None
    if has_accelerator(config, board):
        attempt(problems, partial(engines.require_memory, program, config, board))
        work = work or attempt(problems, partial(offloaded, program, config.offload))
        if work is not None:
            accelerator = attempt(problems, partial(engines.choose_accelerator, program, config, board, work))
    kept = () if work is None or config.offload != "linears" else _linears(work)
    assumed = [_assumed_frame(config.tokens_per_frame)] if asked.assumes_frame else []
    fallbacks = (*assumed, *_fallbacks(program, config, board), *kept, *_board_libraries(board))
    return BuildPlan(
        program=program,
        config=config,
        reasons=asked.reasons,
        board=board,
        pipeline=pipeline_to_string(passes),
        accelerator=accelerator,
        placements=tuple(_placements(program, config, board, accelerator, fallbacks)),
        memory=_memory(program, config, board, accelerator),
        fallbacks=fallbacks,
        problems=tuple(problems),
    )


def _fallbacks(program: DecoderProgram, config: CompileConfig, board: Target) -> Iterator[Fallback]:
    """Yield what the rewritten program does in another way than the options ask for, the linears of the host apart."""
    yield from _unquantised(program, config)
    if has_accelerator(config, board):
        yield from (*_gates(program), *_drafts(program)) if config.offload != "all" else ()
    elif board.kind == "fpga":
        instead = f"the CPU of {board.name} computes them: no accelerator kernel is emitted"
        reason = f"the kernels are int8, and quant is {config.quant!r}"
        layers, hint = tuple(site.layer for site in program.sites), f"choose quant {' or '.join(ACCELERATED)}"
        yield Fallback(kind="accelerator", what="MLPs", layers=layers, instead=instead, reason=reason, hint=hint)
    if program.prefill is None and config.chunk > 1:
        instead = "it goes through the decode step, token by token"
        reason = "an exported program holds the decode step alone"
        hint = "compile the module itself, or choose a prefill chunk of 1"
        yield Fallback(kind="prompt", what="prompt", instead=instead, reason=reason, hint=hint)


def _assumed_frame(frame: int) -> Fallback:
    """Return that nobody said how many tokens a frame has."""
    instead, reason = f"{frame} is assumed", "the model's config gives none"
    hint = "give tokens_per_frame (--tokens-per-frame)"
    return Fallback(kind="assumption", what="tokens_per_frame", instead=instead, reason=reason, hint=hint)


def _layers(layers: tuple[int, ...]) -> str:
    if not layers:
        return ""
    return f" of layer {layers[0]}" if len(layers) == 1 else f" of layers {', '.join(map(str, layers))}"


def _unquantised(program: DecoderProgram, config: CompileConfig) -> Iterator[Fallback]:
    """Yield the linears whose weights stay float32 although a quantisation was chosen."""
    if config.quant == "none":
        return
    for node in (n for graph in with_branches(program.graph_module) for n in graph.graph.nodes):
        if is_op(node, torch.ops.aten.linear):
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
        hint = f"choose one that it has: {', '.join(kind.name.lower() for kind in GateKind)}"
        place, what = tuple(found), "gate"
        yield Fallback(kind="gate", what=what, layers=place, instead="the host decides", reason=reason, hint=hint)


def _drafts(program: DecoderProgram) -> Iterator[Fallback]:
    """Yield the drafts, which the host computes."""
    layers = tuple(s.layer for s in program.sites if s.replay is not None and s.replay.draft is not None)
    if layers:
        reason = "the accelerator computes drafts in whole steps only, and predictions of its speed leave them out"
        instead, hint = "the host computes it", "choose offload='all', or compile without the draft"
        yield Fallback(kind="draft", what="draft", layers=layers, instead=instead, reason=reason, hint=hint)


def _linears(work: Offloaded) -> Iterator[Fallback]:
    """Yield the linears that the host keeps with offload="linears"."""
    for linear in work.kept:
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
        what, instead = "host programs of the board", "they are written as object files, not as a library"
        reason, hint = f"{compiler} is not on PATH", f"install it (Debian: g++-{board.host_triple})"
        yield Fallback(kind="library", what=what, instead=instead, reason=reason, hint=hint)


REST = "attention, norms, embedding, residual adds"
NO_KERNEL = "the accelerator has no kernel for them"
WHOLE = "decode step: MLPs, gates, linears, attention, norms, residual adds"


def _placements(
    program: DecoderProgram, config: CompileConfig, board: Target, plan: Accelerator | None, kept: Sequence[Fallback]
) -> Iterator[Placement]:
    """Yield the parts, the accelerator's first. `kept`: the fallbacks, whose reasons the host's parts repeat."""
    layers = tuple(site.layer for site in program.sites)
    if plan is None:
        reason = next((f.reason for f in kept if f.kind == "accelerator"), "no engine was found: see the problems")
        reason = reason if board.kind == "fpga" else f"target {board.name} has no accelerator"
        yield Placement(what="every part", unit="host", layers=layers, reason=reason)
        return
    if config.offload == "all":
        reason = "a launch for every position of a prompt"
        yield Placement(what=WHOLE, unit="accelerator", layers=layers, calls=1, reason="offload is 'all'")
        yield Placement(what="prefill", unit="accelerator", layers=layers, reason=reason)
        yield Placement(what="embedding", unit="host", reason="it reads one row of a table per token")
        return
    own = tuple(layer for layer, factor in enumerate(plan.table.factors) if factor != 0)
    yield Placement(what="MLP", unit="accelerator", layers=layers, calls=len(layers), reason="offload")
    if own:
        yield Placement(what="gate", unit="accelerator", layers=own, calls=len(own), reason="offload")
    yield from _calls(plan)
    for f in kept:
        if f.kind in ("gate", "draft", "linear"):
            yield Placement(what=f.what, unit="host", layers=f.layers, reason=f.reason)
    if config.offload == "mlp":
        yield Placement(what="projections and head", unit="host", layers=layers, reason="offload is 'mlp'")
    yield Placement(what=REST, unit="host", layers=layers, reason=NO_KERNEL)
    if program.prefill is not None:
        yield Placement(what="prefill", unit="host", layers=layers, reason="the accelerator decodes only")


def _calls(plan: Accelerator) -> Iterator[Placement]:
    """Yield the linear calls by their place in a layer."""
    places: dict[str, list[int | None]] = defaultdict(list)
    for call in plan.calls:
        places[call.name.rpartition(".")[2]].append(call.layer)
    for place, found in places.items():
        own, reason = tuple(layer for layer in found if layer is not None), "offload is 'linears'"
        yield Placement(what=place, unit="accelerator", layers=own, calls=len(found), reason=reason)


def _memory(program: DecoderProgram, config: CompileConfig, board: Target, plan: Accelerator | None) -> PlannedMemory:
    """Return the bytes of weights and state, and where they are."""
    totals = {str(role): sum(s.nbytes for s in program.state if s.role is role) for role in StateRole}
    state = {role: size for role, size in totals.items() if size}
    banks = tuple(_banks(program, config, board, plan))
    return PlannedMemory(weights=program.params.nbytes(), state=state, banks=banks)


def _banks(program: DecoderProgram, config: CompileConfig, board: Target, plan: Accelerator | None) -> Iterator[Bank]:
    whole = board.shares_memory or config.offload == "all"
    own = program.params.nbytes() + sum(s.nbytes for s in program.state)
    if plan is None or not whole:
        yield Bank(memory="host", holds="parameters and state", used=own)
    if plan is None:
        return
    name, footprint = " + ".join(m.name for m in board.weight_memories), engines.footprint_of(program, config, board)
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
