"""What a model is asked: a workload on a board, its design, and which rows compute in its forwards."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import Exploration, explore
from fastcar_compile.codegen.hls.design.memory import GB, bank_excess, capacity, require_banks, require_fit
from fastcar_compile.codegen.hls.model.engine import Engine
from fastcar_compile.codegen.hls.model.step import Board, host_of, without_replay
from fastcar_compile.codegen.hls.model.workload import Workload
from fastcar_compile.codegen.hls.step_program import builder
from fastcar_compile.codegen.hls.step_program.builder import AttentionForm, CacheForm, ReplayForm
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.codegen.hls.step_program.replaying import Decide
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import InputError
from fastcar_compile.ir.exact import logit_factor
from fastcar_compile.support.values import read_arrays, warn

Decisions = NDArray[np.bool_]


class Mapping(StrEnum):
    """How computing rows are given to cores."""

    DRS = "drs"
    STATIC = "static"


class Draw(StrEnum):
    """How decisions of a replay ratio are drawn."""

    INDEPENDENT = "independent"
    CORRELATED = "correlated"
    PAIRS = "pairs"


def draw_decisions(
    shape: tuple[int, int, int], replay: float, kind: Draw = Draw.INDEPENDENT, seed: int = 0
) -> Decisions:
    """Return decisions bool [forwards, layers, rows] of a replay ratio, exact per layer and row up to one forward.

    Args:
        kind: rows that decide each for itself; all alike (correlated); or guidance pairs, rows b and b + B / 2 alike.

    Raises:
        InputError: pairs of an odd number of rows.
    """
    forwards, layers, rows = shape
    if kind is Draw.PAIRS:
        _require_pairs(rows)
    own = {Draw.INDEPENDENT: rows, Draw.PAIRS: rows // 2, Draw.CORRELATED: 1}[kind]
    ranks = np.random.default_rng(seed).random((forwards, layers, own)).argsort(0).argsort(0)
    return np.tile(ranks < round(replay * forwards), rows // own)


def coupled(decisions: Decisions) -> Decisions:
    """Return decisions bool [..., B] in which rows b and b + B / 2 replay only together, as with `couple_cfg`.

    Raises:
        InputError: the number of rows is odd.
    """
    _require_pairs(decisions.shape[-1])
    first, second = np.split(decisions, 2, axis=-1)
    return np.concatenate([first & second] * 2, axis=-1)


def _require_pairs(rows: int) -> None:
    if rows % 2:
        raise InputError(f"{rows} row(s) are no guidance pairs", hint="pairs are rows b and b + B / 2 of an even batch")


def core_rows(computing: NDArray[np.bool_], cores: int, mapping: Mapping) -> NDArray[np.int64]:
    """Return how many rows every core computes, int [..., cores], of computing rows bool [..., rows]."""
    if cores < 1:
        raise InputError(f"there are no {cores} cores", hint="give at least one")
    if mapping is Mapping.DRS:
        active = computing.sum(-1, keepdims=True)
        return (active - np.arange(cores) + cores - 1) // cores
    padded = np.zeros((*computing.shape[:-1], -(-computing.shape[-1] // cores) * cores), bool)
    padded[..., : computing.shape[-1]] = computing
    return padded.reshape(*computing.shape[:-1], -1, cores).sum(-2)


def passes_of(decisions: Decisions, cores: int, mapping: Mapping) -> NDArray[np.int64]:
    """Return the passes of every layer, int [forwards, layers]; 0: every row replays."""
    return core_rows(~decisions, cores, mapping).max(-1)


_HINT = "write it with `fastcar run --trace`, or np.save(path, session.stats.decisions)"


def load_trace(path: Path) -> NDArray[np.bool_]:
    """Return decisions bool [forwards, layers, rows], True where a row replayed.

    Raises:
        InputError: the file is missing, cannot be read, or holds something else.
    """
    arrays = read_arrays(path, "trace", _HINT)
    decisions = arrays.get("", np.empty(0))
    if decisions.dtype != np.bool_ or decisions.ndim != 3:
        kind = f"{decisions.dtype} {list(decisions.shape)}" if "" in arrays else "an archive"
        what = f"the trace holds {kind}, expected bool [forwards, layers, rows]"
        raise InputError(what, where=str(path), hint=_HINT)
    return decisions


# The question.


SYNTHETIC_FORWARDS = 200
"""Forwards of the decisions made for a given replay ratio: it is met to half a percent."""

EPSILON = 1e-5
"""Epsilon of the norms in LLaMA-2-7B's config.json; the time of a step does not depend on it."""


@dataclass(frozen=True)
class Question:
    """A workload whose figures are checked.

    Args:
        what_if: what the compiler does not emit of it. found: why this design; None: it was given.
        decisions: bool [forwards, layers, rows], True where a row replays. attended: positions per forward.
        gated: whether something decides. program: of whole steps; None: the host sequences the calls.
    """

    workload: Workload
    target: Target
    design: Design
    what_if: tuple[str, ...]
    found: Exploration | None
    decisions: Decisions
    attended: NDArray[np.integer]
    gated: bool
    program: StepProgram | None = None

    def board(self, model: type[Engine] = Engine) -> Board:
        """Return the board; the tests give it another model of its engine."""
        control = self.workload.control_table(self.design.mlp.cores)
        engine, gate = model(self.design, self.target, control), self.workload.gate if self.gated else None
        return Board(engine, host_of(self.target), self.workload, gate, self.program)


def ask(
    workload: Workload,
    target: Target,
    *,
    decisions: Decisions | None = None,
    design: Design | None = None,
    what_if: bool = False,
    recorded: bool = True,
    program: StepProgram | None = None,
) -> Question:
    """Check a workload and find its design.

    Args:
        decisions: bool [forwards, layers, rows], True where a row replays; None: drawn for `workload.replay`.
        design: an emitted design; None: the best that fits the board.
        what_if: accept also what the compiler does not emit.
        recorded: whether the decisions are those of a session from its first forward on (`session.stats.decisions`):
            forward t then attends to t + 1 positions, at most `context`.
        program: the step program of the design; None: the one that the compiler would write for the shape.

    Raises:
        InputError: a figure or the decisions do not fit the workload, or it is not emitted.
        TargetError: the target lacks what the model needs.
        CompileError: the decoder does not fit the board.
    """
    workload.check()
    reasons = _require_emitted(workload, target, what_if=what_if)
    found = None
    if design is None:
        found = explore(workload.kernel_spec(), target, banks=not what_if)
        design = found.design
        if found.slow:
            warn(f"the accelerator is slow: {found.slow}", 3)
    elif not what_if:
        held = bank_excess(target, ports=design.axi_weight_ports, stream_bytes=design.weight_bytes)
        require_banks(target, [held])
    gated = workload.replay > 0 if decisions is None else bool(decisions.any())
    if decisions is None:
        kind, size = Draw.PAIRS if workload.couple_cfg else Draw.INDEPENDENT, (workload.shape.layers, workload.batch)
        trace = draw_decisions((SYNTHETIC_FORWARDS, *size), workload.replay, kind)
    else:
        trace = _checked(decisions, workload)
    attended = np.full(len(trace), workload.filled if workload.offload == "all" else workload.attended)
    if decisions is not None and recorded:
        attended = np.minimum(attended, np.arange(1, len(trace) + 1))
    ran = _program(workload, design, program, gated=gated) if workload.offload == "all" else None
    return Question(workload, target, design, reasons, found, trace, attended, gated, ran)


def _program(workload: Workload, design: Design, program: StepProgram | None, *, gated: bool) -> StepProgram:
    """Return the program to time; one that decides nothing cannot say what a replay takes."""
    if program is None or (gated and not any(isinstance(i, Decide) for i in program.instructions)):
        program = program_of_shape(workload, design)
    return program if gated else without_replay(program)


def _require_emitted(workload: Workload, target: Target, *, what_if: bool) -> tuple[str, ...]:
    """Return what the workload asks for that the compiler does not emit; refuse it unless `what_if`."""
    reasons, footprint = tuple[str, ...](), workload.footprint(target)
    if target.estimate_only is not None:
        reasons = (f"an artifact for {target.name}: {target.estimate_only}",)
    if reasons and not what_if:
        what = f"the compiler does not emit this: {'; '.join(reasons)}"
        raise InputError(what, hint="choose a board that artifacts are built for, or ask with what_if=True (--what-if)")
    if not what_if:
        require_fit(footprint, target, quant=workload.quant, positions=workload.cached_rows)
    if footprint.total > (room := capacity(target)):
        return *reasons, f"memory of {footprint.total / GB:.2f} GB: the board has room for {room / GB:.2f} GB"
    return reasons


def _checked(decisions: Decisions, workload: Workload) -> Decisions:
    expected = (workload.shape.layers, workload.batch)
    if decisions.dtype != np.bool_ or decisions.ndim != 3 or decisions.shape[1:] != expected or not len(decisions):
        raise InputError(
            f"the decisions are {decisions.dtype} {list(decisions.shape)}, "
            f"expected bool [forwards, {expected[0]} layers, {expected[1]} rows]",
            hint="give session.stats.decisions of a session of this decoder with record=True",
        )
    if workload.couple_cfg and (coupled(decisions) != decisions).any():
        what = "the decisions are not those of guidance pairs, which replay only together here"
        raise InputError(what, hint="record them with this artifact")
    return decisions


def program_of_shape(work: Workload, design: Design) -> StepProgram:
    """Return the step program of a workload on a design.

    Raises:
        UserError: sizes that no step program has.
    """
    shape, gate = work.shape, work.gate
    units = (gate.units,) * shape.layers if gate.units else ()
    replay = ReplayForm(shape.tokens_per_frame, (True,) * shape.layers, gate.kind, units)
    return builder.step_program(design, _attention(work), builder.NormForm(EPSILON), replay)


def _attention(work: Workload) -> AttentionForm:
    shape, (sinks, window) = work.shape, work.sink_window or (0, builder.NO_WINDOW)
    cache = CacheForm(sinks, work.cached_rows - sinks, window, work.rows)
    factor = float(logit_factor(shape.head_dim**-0.5))
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    return AttentionForm(*heads, shape.head_dim, work.cached_rows, factor, cache)
