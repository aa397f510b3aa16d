"""One decode step of a board by the cycle model: what `fastcar simulate` and `fc.simulate` answer."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fastcar_compile.artifact.reader import read_manifest
from fastcar_compile.codegen.hls.design.product import WORD_BYTES
from fastcar_compile.drs.reader import read_table
from fastcar_compile.drs.simulator import map_rows
from fastcar_compile.drs.table import DrsTable
from fastcar_compile.errors import InternalError
from fastcar_compile.estimate.artifact import design_of, program_of, workload_of
from fastcar_compile.estimate.call import Call
from fastcar_compile.estimate.engine import RowLoad
from fastcar_compile.estimate.prediction import Prediction, Runs
from fastcar_compile.estimate.question import SYNTHETIC_FORWARDS, Question, ask
from fastcar_compile.estimate.rows import Decisions, Draw, Mapping, coupled, draw_decisions, passes_of
from fastcar_compile.estimate.step import Step
from fastcar_compile.simulation.engine import CycleModel
from fastcar_compile.simulation.network import ProcessResult, Result
from fastcar_compile.values import check_kind, number, path_of, whole


@dataclass(frozen=True)
class ProcessTime:
    """One process over a step, clocks: its work, and its waiting by cause; outside of calls it does not exist."""

    busy: float
    stalls: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Simulation(Prediction):
    """A prediction by the cycle model.

    Attributes:
        mapping: of rows to cores. forwards: simulated. cores: of the array. clock_hz: of the fabric.
        clocks_per_step: the step in clocks of the fabric.
        seconds: unit -> mean seconds: drs, memory, ports, compute and edge of engine calls, attend and vector of
            instructions, launch, host, attention.
        stream_of_memory: bytes of weights in the time of the engine's calls, of those that the memory could deliver to
            its ports in that time.
        passes: mean over forwards and layers that compute, of the core that has most.
        processes, roots: of the forward that is nearest to the mean, over all of its calls, clocks: every process, and
            what the waiting of the multipliers goes back to. typical, calls: that forward in detail.
        deadlock: the calls whose networks came to their end; one that does not is an error that names the circle.
    """

    mapping: str
    forwards: int
    cores: int
    clock_hz: float
    clocks_per_step: float
    seconds: dict[str, float]
    stream_of_memory: float
    passes: float
    processes: dict[str, ProcessTime]
    roots: dict[str, float]
    deadlock: str
    typical: Step
    calls: dict[Call, Result]
    decisions: Decisions

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"typical", "calls", "decisions"})


def simulate(
    artifact: str | Path,
    *,
    replay: float | None = None,
    decisions: Decisions | None = None,
    draw: Draw = Draw.INDEPENDENT,
    seed: int = 0,
    mapping: Mapping = Mapping.DRS,
) -> Simulation:
    """Simulate a decode step of an artifact on its board.

    Args:
        artifact: its folder.
        replay: share that replays, drawn; None: nothing replays, unless `decisions` are given.
        decisions: recorded, bool [forwards, layers, rows].
        draw, seed: how rows are drawn for `replay`. With `Draw.PAIRS` recorded decisions are coupled too: a row replays
            only where its partner does. An artifact with `couple_cfg` draws pairs by itself.
        mapping: of rows to cores; the static one is for comparison only.

    Raises:
        UserError: the artifact has no engine, or a figure is out of range.
    """
    check_kind("draw", draw, Draw, f"one of {', '.join(map(str, Draw))}")
    check_kind("mapping", mapping, Mapping, f"one of {', '.join(map(str, Mapping))}")
    seed = whole("seed", seed, 0)
    ratio = 0.0 if replay is None else number("replay", replay, "give a share from 0 to 1")
    folder = path_of("the artifact", artifact)
    manifest = read_manifest(folder)
    table = None
    if manifest.accelerator is not None:
        table = read_table((folder / manifest.accelerator.table).read_bytes())
    work = replace(workload_of(manifest), replay=ratio)
    work.check()
    recorded = decisions is not None
    if decisions is None:
        shape = (SYNTHETIC_FORWARDS, work.shape.layers, work.batch)
        kind = Draw.PAIRS if work.couple_cfg and draw is Draw.INDEPENDENT else draw
        decisions = draw_decisions(shape, work.replay, kind, seed)
    elif draw is Draw.PAIRS:
        decisions = coupled(decisions)
    question = ask(
        work,
        manifest.target,
        decisions=decisions,
        design=design_of(manifest, manifest.target),
        recorded=recorded,
        program=program_of(manifest, folder),
    )
    return simulate_question(question, table, mapping)


def simulate_question(question: Question, table: DrsTable | None = None, mapping: Mapping = Mapping.DRS) -> Simulation:
    """Simulate a decode step of a question; `table`: the one that was emitted, else the compiler's for these sizes."""
    board = question.board(CycleModel)
    engine = board.engine
    if not isinstance(engine, CycleModel):
        raise InternalError("the board's engine is not the cycle model")
    runs = Runs.of(question, board, mapping)
    if mapping is Mapping.DRS:
        check_dispatch(table or question.workload.control_table(engine.cores), question.decisions, engine.cores)
    return _simulation(question, runs, engine, mapping)


def check_dispatch(table: DrsTable, decisions: Decisions, cores: int) -> None:
    """Raise InternalError where the Mapping Registers of the table's rows and cores give other passes than simulated.

    The forward with most rows is mapped.
    """
    forward = int((~decisions).sum((1, 2)).argmax())
    registers = [int(sum(1 << int(row) for row in np.flatnonzero(~layer))) for layer in decisions[forward]]
    passes = passes_of(decisions[forward : forward + 1], cores, Mapping.DRS)[0]
    for layer, register in enumerate(registers):
        mapping = map_rows(register, table.rows, table.cores)
        numbers = [mapping[row].pass_number for row in range(table.rows) if register >> row & 1]
        found = RowLoad(len(numbers), max(numbers, default=-1) + 1)
        wanted = RowLoad(register.bit_count(), int(passes[layer]))
        if found != wanted:
            raise InternalError(f"layer {layer}: the control table maps {found}, the model counts {wanted}")


def _simulation(question: Question, runs: Runs, engine: CycleModel, mapping: Mapping) -> Simulation:
    run, counts = runs.step, Counter(call for _at, call in runs.step.typical.calls)
    passes = passes_of(question.decisions, engine.cores, mapping)
    delivered = engine.memory.rate * WORD_BYTES * engine.clock_hz
    return Simulation(
        **runs.common(question, engine.cores),
        mapping=mapping.value,
        forwards=len(question.decisions),
        cores=engine.cores,
        clock_hz=engine.clock_hz,
        clocks_per_step=run.seconds * engine.clock_hz,
        seconds=run.busy,
        stream_of_memory=run.weight_bytes / run.streaming / delivered if run.streaming else 0.0,
        passes=float(passes[passes > 0].mean()) if passes.any() else 0.0,
        processes=_processes(counts, engine),
        roots=_sum({call: engine.results[call].roots for call in counts}, counts),
        deadlock=f"none: {len(engine.results)} networks of calls came to their end",
        typical=run.typical,
        calls={call: engine.results[call] for call in counts},
        decisions=question.decisions,
    )


def _processes(counts: Counter[Call], engine: CycleModel) -> dict[str, ProcessTime]:
    """Return what every process does over the calls of a step. In a call without it, a process has nothing to do."""
    names = dict.fromkeys(name for call in counts for name in engine.results[call].processes)
    absent = ProcessResult(0.0, {}, {}, 0.0, ())
    found = {}
    for name in names:
        each = {call: engine.results[call].processes.get(name, absent) for call in counts}
        stalls = _sum({call: process.stalls for call, process in each.items()}, counts)
        idle = sum(counts[call] * (engine.results[call].clocks - process.end) for call, process in each.items())
        busy = sum(counts[call] * process.busy for call, process in each.items())
        found[name] = ProcessTime(busy, stalls | ({"barrier: end of the call": idle} if idle > 0 else {}))
    return found


def _sum(parts: dict[Call, dict[str, float]], counts: Counter[Call]) -> dict[str, float]:
    total = defaultdict[str, float](float)
    for call, values in parts.items():
        for cause, clocks in values.items():
            total[cause] += counts[call] * clocks
    return dict(total)
