"""The system simulator: one decode step of a board as a time line of engine, host and attention."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design.controller import ControlOp
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import resources_of
from fastcar_compile.codegen.hls.design.memory import capacity, measured_cap, peak_bandwidth
from fastcar_compile.codegen.hls.model.question import Decisions, Mapping, Question, ask, passes_of
from fastcar_compile.codegen.hls.model.shapes import load_shape
from fastcar_compile.codegen.hls.model.step import STREAMING, Board, ProgramTimes, StepCost, run_program, simulate_step
from fastcar_compile.codegen.hls.model.workload import Offload, Workload
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A prediction for one step, the mean of all forwards: seconds, bytes, joules, and shares of one.

    Attributes:
        unit: what `tokens_per_second` counts: "token", or "backbone position" where the head is no part of the decoder.
        what_if: what was asked for that the compiler does not emit, as texts; empty: this is an emitted design.
        table_load_seconds: of loading the control table, once per session and not part of a step.
        measured_utilisation: bytes moved over the whole step, against the measured bandwidth of the weight memories.
        prefill_positions_per_second: of a kernel of whole steps, which reads as many positions of a prompt per launch and
            weight stream as a video has rows; None: the host sequences the calls.
        speedup_over_dense: over `comparison["dense"]`.
        comparison: tokens per second of others on the same board and array. dense: the decoder compiled without replay:
            no gate, no caches. nothing_replays: as predicted, but every decision is to compute.
            static_mapping: row b on core b mod C.
        passes_by_mapping: mapping -> passes of the busiest core, mean over forwards and layers; 0 where all replay.
        step, dense: the time line of one step whose replays are nearest to the mean, and of the decoder compiled
            without replay.
        attended: positions that attention reads, at most `context`.
        bandwidth_utilisation: bytes moved over the whole step, against the peak of the weight memories.
        weight_stream_utilisation: the same of weights alone, over the time in which the engine works.
        bound_by: memory, ports, compute, drs, launch, host, attention (on the host), attend (in the fabric) or vector:
            what takes the largest share of the step.
        shares: unit -> share of the step.
        gate: name, what decides, units of its network, bytes of its cache and of its weights, all layers.
        draft: layers that have one, the most neurons and the highest rank, the weights as a share of those of all MLPs, and
            their bytes; empty: none has one.
        depth: codes of a position, seconds that the depth head takes for them, and positions/s of both decoders by turns,
            with and without replay; or `refused`, why the board has no room for it; empty: the decoder has no such head.
        watts: the power, and between which two it may be, by how far the model is from published boards.
        curve: by context, in its eighths: `tokens_per_second`; `first_token_s`, the seconds until a prompt of so many
            positions has given its first token, of a kernel of whole steps; and `accepted_per_second`, the tokens of
            coupled decoding, where it is known how many a launch accepts.
        exploration: what was compared to find the design; empty for a given design.
    """

    what_if: tuple[str, ...]
    target: str
    shape: str
    unit: str
    quant: str
    offload: str
    batch: int
    rows: int
    context: int
    replay_ratio: float
    tokens_per_second: float
    seconds_per_step: float
    table_load_seconds: float
    measured_utilisation: float
    prefill_positions_per_second: float | None
    speedup_over_dense: float
    comparison: dict[str, float]
    passes_by_mapping: dict[str, float]
    step: StepCost
    dense: StepCost
    attended: int
    bytes_per_step: float
    macs_per_step: float
    bandwidth_utilisation: float
    weight_stream_utilisation: float
    energy_per_token_j: float
    power_w: float
    bound_by: str
    shares: dict[str, float]
    memory: dict[str, int]
    gate: dict[str, Any]
    draft: dict[str, Any]
    resources: dict[str, Any]
    design: dict[str, Any]
    depth: dict[str, Any]
    watts: tuple[float, float, float]
    curve: list[dict[str, float]]
    exploration: dict[str, Any] = field(default_factory=dict)

    @property
    def time_line(self) -> list[dict[str, Any]]:
        """The segments of `step`."""
        return [asdict(segment) for segment in self.step.segments]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("step", "dense")}
        return values | {"time_line": self.time_line}


def estimate(
    workload: Workload,
    target: Target,
    *,
    decisions: Decisions | None = None,
    design: Design | None = None,
    program: StepProgram | None = None,
    what_if: bool = False,
) -> Estimate:
    """Predict the decode speed of a workload on a board.

    Args:
        decisions: bool [forwards, layers, rows], True where a row replayed (`session.stats.decisions`); forward t then
            attends to t + 1 positions, at most `context`. None: decisions drawn for `workload.replay`.
        design: an emitted design; None: the best that fits the board. program: the step program that was emitted with
            it; None: the one that the compiler would write for the shape.
        what_if: predict also what the compiler does not emit; the result says what that is.

    Raises:
        InputError: a figure or the decisions do not fit the workload, or it is not emitted.
        TargetError: the target lacks what the model needs.
        CompileError: the decoder does not fit the board.
    """
    question = ask(workload, target, decisions=decisions, design=design, program=program, what_if=what_if)
    return estimate_question(question)


def default_offload(
    workload: Workload, target: Target, *, whole: tuple[Design, StepProgram | None] | None = None, what_if: bool = False
) -> Offload:
    """Return what the accelerator computes where nobody says: "all", or "linears" where that takes less time; or "mlp".

    A whole step has int8 keys and values and decides in the fabric; other decoders have "mlp". The times are those of a
    dense step, so the workload's replay plays no part. A form that does not fit the board is left out.

    Args:
        whole: the design and the program of whole steps, where they are known.
    """
    if workload.kv != "int8" or workload.gate.on_host:
        return "mlp"
    seconds = dict[Offload, float]()
    emitted: dict[Offload, tuple[Design, StepProgram | None] | None] = {"all": whole, "linears": None}
    for offload, known in emitted.items():
        work, (design, program) = replace(workload, offload=offload, replay=0.0), known or (None, None)
        try:
            question = ask(work, target, design=design, program=program, what_if=what_if)
        except UserError:
            continue
        seconds[offload] = _dense(question, question.board()).seconds
    return min(seconds, key=seconds.__getitem__) if seconds else "all"


def _dense(question: Question, board: Board) -> SystemRun:
    """Return the forwards of the decoder compiled without replay."""
    return SystemRun.of(board.dense, np.zeros_like(question.decisions), question.attended)


def estimate_question(question: Question) -> Estimate:
    """Predict the decode speed that a question asks for."""
    work, target, design, trace = question.workload, question.target, question.design, question.decisions
    board, attended, computing = question.board(), question.attended, np.zeros_like(trace)
    run, nothing = SystemRun.of(board, trace, attended), SystemRun.of(board, computing, attended)
    dense = nothing if board.gate is None else _dense(question, board)
    static = SystemRun.of(board, trace, attended, Mapping.STATIC)
    others = {"dense": dense, "nothing_replays": nothing, "static_mapping": static}
    table = StepCost()
    table.call("load table", 0, board, board.engine.control_call(ControlOp.TABLE))
    power, peak, macs, footprint = target.power, peak_bandwidth(target), _macs(work, trace), work.footprint(target)
    resources = resources_of(design, work.kernel_spec(), target)
    switching = resources["lut"]["used"] * design.budget.clock_mhz * 1e6 * power.lut_pj_per_clock * run.seconds
    joules = (run.bytes * power.dram_pj_per_byte + macs * power.mac_int8_pj + switching) * 1e-12
    energy = (power.static_w * run.seconds + joules) / work.batch
    watts = energy * work.batch / run.seconds
    return Estimate(
        what_if=question.what_if,
        target=target.name,
        shape=work.shape.name,
        unit=work.shape.unit,
        quant=work.quant,
        offload=work.offload,
        batch=work.batch,
        rows=work.rows,
        context=work.context,
        replay_ratio=float(trace.mean()),
        tokens_per_second=work.batch / run.seconds,
        seconds_per_step=run.seconds,
        table_load_seconds=table.seconds,
        measured_utilisation=run.bytes / run.seconds / measured_cap(target),
        prefill_positions_per_second=work.rows / dense.seconds if question.program else None,
        speedup_over_dense=dense.seconds / run.seconds,
        comparison={name: work.batch / other.seconds for name, other in others.items()},
        passes_by_mapping={m.value: float(passes_of(trace, design.mlp.cores, m).mean()) for m in Mapping},
        step=run.typical,
        dense=dense.typical,
        attended=work.attended,
        bytes_per_step=run.bytes,
        macs_per_step=macs,
        bandwidth_utilisation=run.bytes / run.seconds / peak,
        weight_stream_utilisation=run.weight_bytes / run.streaming / peak if run.streaming else 0.0,
        energy_per_token_j=energy,
        power_w=watts,
        watts=(watts, watts * (1 - power.uncertainty), watts * (1 + power.uncertainty)),
        curve=_curve(question, board),
        bound_by=max(run.busy, key=lambda unit: run.busy[unit]),
        shares={unit: value / run.seconds for unit, value in run.busy.items()},
        gate=work.gate.to_json(work.shape, work.batch),
        draft=_draft(work),
        memory={**asdict(footprint), "total": footprint.total, "capacity": capacity(target)},
        resources=resources,
        design=design.part.model_dump(mode="json"),
        depth=_depth(work, target, run.seconds, dense.seconds),
        exploration=question.found.part.model_dump(mode="json") if question.found else {},
    )


def _curve(question: Question, board: Board) -> list[dict[str, float]]:
    """Return plain values by context: an eighth, a quarter, a half and all of the workload's."""
    work, found = question.workload, list[dict[str, float]]()
    for context in sorted({max(1, work.context // share) for share in (8, 4, 2, 1)}):

        def seconds(board: Board, trace: Decisions, positions: int) -> float:
            attended = np.full(len(trace), min(positions, int(question.attended.max())))
            return SystemRun.of(board, trace, attended).seconds

        step = seconds(board, question.decisions, context)
        row = {"context": context, "tokens_per_second": work.batch / step}
        if work.accepted is not None:
            row["accepted_per_second"] = work.accepted * (work.batch // work.rows) / step
        if question.program:
            # Attention reads half of the prompt in the mean.
            dense = seconds(board.dense, np.zeros_like(question.decisions[:1]), -(-context // 2))
            row["first_token_s"] = -(-context // work.rows) * dense
        found.append(row)
    return found


def _depth(work: Workload, target: Target, seconds: float, dense: float) -> dict[str, Any]:
    """Return plain values of the depth head, whose linears are in the fabric; seconds: of the body's steps."""
    if work.shape.depth is None:
        return {}
    shape = load_shape(work.shape.depth)
    head = Workload(shape, work.quant, shape.frames, batch=work.batch, offload="linears")
    try:
        own = shape.frames * estimate(head, target, what_if=target.estimate_only is not None).seconds_per_step
    except UserError as error:
        return {"shape": shape.name, "codes": shape.frames, "refused": error.what}
    speeds = {"positions_per_second": work.batch / (seconds + own), "dense": work.batch / (dense + own)}
    return {"shape": shape.name, "codes": shape.frames, "seconds": own, **speeds}


def _draft(work: Workload) -> dict[str, Any]:
    """Return plain values of the drafts, for a result."""
    own, shape = [size for size in work.drafts if size is not None], work.shape
    shares = [size.share(shape.intermediate, shape.gated) for size in own]
    return (
        {}
        if not own
        else {
            "layers": len(own),
            "neurons": max(size.neurons for size in own),
            "rank": max(size.rank for size in own),
            "share": sum(shares) / shape.layers,
            "bytes": work.draft_bytes,
        }
    )


def _macs(work: Workload, trace: Decisions) -> float:
    """Return the multiply-accumulates of a mean step: every linear for every row, the MLP for the rows that compute.

    A draft has two rows in its first product, and one in its second, for each row that replays.
    """
    shape = work.shape
    mlp = sum(x.macs for x in shape.mlp_linears) * float((~trace).sum(axis=(1, 2)).mean())
    others = shape.layers * sum(x.macs for x in shape.attention_linears) + (shape.head.macs if shape.head else 0)
    replayed = trace.sum(axis=2).mean(axis=0) if work.drafts else ()
    sizes = (
        (rows, shape.draft_linears(own)) for rows, own in zip(replayed, work.drafts, strict=True) if own is not None
    )
    return mlp + others * work.batch + sum(float(rows) * (2 * x.macs + y.macs) for rows, (x, y) in sizes)


@dataclass(frozen=True)
class SystemRun:
    """All forwards of a trace: means per step, and the step nearest to the mean."""

    seconds: float
    bytes: float
    weight_bytes: float
    busy: dict[str, float]
    typical: StepCost

    @property
    def streaming(self) -> float:
        """Seconds in which the array or the weight ports work."""
        return sum(self.busy.get(unit, 0.0) for unit in STREAMING)

    @classmethod
    def of(
        cls, board: Board, trace: Decisions, attended: NDArray[np.integer], mapping: Mapping = Mapping.DRS
    ) -> SystemRun:
        """Return the means; forwards of equal load are simulated once, at their mean of attended positions."""
        cores, twice = board.engine.cores, np.concatenate([trace, trace], -1)
        # A draft takes two rows of the array for each row that replays.
        drafted = passes_of(~twice, cores, mapping) * bool(board.engine.design.drafts)
        loads = np.stack([(~trace).sum(-1), passes_of(trace, cores, mapping), drafted], axis=-1)
        keys = loads.reshape(len(trace), -1)
        kinds, kind_of, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        means = np.bincount(kind_of.reshape(-1), attended) / counts
        times = None if board.program is None else ProgramTimes(board, board.program)

        def forward(number: int, kept: bool) -> StepCost:
            return _forward(board, times, kinds[number].tolist(), means[number], StepCost(kept))

        steps = [forward(number, kept=False) for number in range(len(kinds))]
        share = counts / counts.sum()

        def mean(values: list[float]) -> float:
            return float(np.dot(share, values))

        seconds = mean([s.seconds for s in steps])
        typical = min(range(len(steps)), key=lambda n: abs(steps[n].seconds - seconds))
        units = sorted({unit for s in steps for unit in s.busy})
        return cls(
            seconds,
            mean([s.bytes for s in steps]),
            mean([s.weight_bytes for s in steps]),
            {unit: mean([s.busy.get(unit, 0.0) for s in steps]) for unit in units},
            forward(typical, kept=True),
        )


def _forward(board: Board, times: ProgramTimes | None, kind: list[int], attended: float, run: StepCost) -> StepCost:
    """Return `run` with one forward. kind: per layer the computing rows, the passes of the busiest core, and those of
    a draft."""
    loads = tuple(map(board.engine.load, kind[::3], kind[1::3]))
    if times is None:
        return simulate_step(board, loads, attended, run)
    rows = (2 * (board.work.batch - load.rows) for load in loads)
    return run_program(times, loads, attended, tuple(map(board.engine.load, rows, kind[2::3])), run)


# The time line of one decode step, instruction by instruction, as events of the format of Chrome's traces, which
# chrome://tracing, ui.perfetto.dev and the inspection page show.


LANES = {
    "host": ("launch", "host", "attention"),
    "call": ("call",),
    "controller": ("drs",),
    "array": ("memory", "ports", "compute"),
    "rows in and out": ("edge",),
    "attention": ("attend",),
    "vector": ("vector",),
}
"""Lane -> what its spans wait for: the host; the calls and instructions of the engine; and what they consist of."""

LANE_OF = {unit: lane for lane, units in enumerate(LANES.values()) for unit in units}


def trace_events(step: StepCost) -> list[dict[str, Any]]:
    """Return the lanes and spans of a step as events, times in microseconds; the category is what a span waits for."""
    spans = [*step.segments, *step.calls]
    used = {LANE_OF[span.unit] for span in spans}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(LANES)
        if lane in used
    ]
    return names + [
        {"name": span.name, "cat": span.unit, "ph": "X", "pid": 1, "tid": LANE_OF[span.unit]}
        | {"ts": round(1e6 * span.start, 4), "dur": round(1e6 * span.seconds, 4)}
        | {"args": {"layer": span.layer, "bytes": span.bytes}}
        for span in spans
    ]


def write_time_line(estimate: Estimate, path: Path) -> None:
    """Write the step nearest to the mean as a file that Chrome and Perfetto open."""
    what = f"{estimate.shape} {estimate.quant} on {estimate.target}, predicted, {estimate.replay_ratio:.1%} replay"
    note = {"estimate": what, "what_if": list(estimate.what_if)}
    events = trace_events(estimate.step)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": note}) + "\n")
