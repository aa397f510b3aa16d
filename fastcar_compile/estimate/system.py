"""The system simulator: one decode step of a board as a time line of engine, host and attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.dram import peak_bandwidth
from fastcar_compile.codegen.hls.design.exploration import resources_of
from fastcar_compile.codegen.hls.design.footprint import capacity
from fastcar_compile.estimate.engine import ClosedForm
from fastcar_compile.estimate.question import Question, ask
from fastcar_compile.estimate.rows import Decisions, Mapping
from fastcar_compile.estimate.run import Run
from fastcar_compile.estimate.workload import Workload
from fastcar_compile.targets import Target


@dataclass(frozen=True)
class Estimate:
    """A prediction. Times in seconds, sizes in bytes, energy in joules; shares of one.

    Attributes:
        what_if: what was asked for that the compiler does not emit, as texts; empty: this is an emitted design.
        attended: positions that attention reads, at most `context`.
        bandwidth_utilisation: bytes moved over the whole step, against the peak of the weight memories.
        weight_stream_utilisation: the same of weights alone, over the time in which the engine works.
        bound_by: memory, ports, compute, launch, host or attention: what takes the largest share of the step.
        shares: unit -> share of the step.
        comparison: tokens per second with static mapping, and dense: nothing replays, though the gate decides.
        gate: name, what decides, units of its network, bytes of its cache and of its weights, all layers.
        exploration: what was compared to find the design; empty for a given design.
        time_line: the segments of one step whose replays are nearest to the mean.
    """

    what_if: tuple[str, ...]
    target: str
    shape: str
    quant: str
    offload: str
    batch: int
    context: int
    attended: int
    replay_ratio: float
    tokens_per_second: float
    seconds_per_step: float
    bytes_per_step: float
    macs_per_step: float
    bandwidth_utilisation: float
    weight_stream_utilisation: float
    energy_per_token_j: float
    power_w: float
    bound_by: str
    shares: dict[str, float]
    speedup_over_dense: float
    comparison: dict[str, float]
    memory: dict[str, int]
    gate: dict[str, Any]
    resources: dict[str, Any]
    design: dict[str, Any]
    time_line: list[dict[str, Any]]
    exploration: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def estimate(
    workload: Workload,
    target: Target,
    *,
    decisions: Decisions | None = None,
    design: Design | None = None,
    what_if: bool = False,
) -> Estimate:
    """Predict the decode speed of a workload on a board.

    Args:
        decisions: bool [forwards, layers, rows], True where a row replayed (`session.stats.decisions`); forward t then
            attends to t + 1 positions, at most `context`. None: decisions drawn for `workload.replay`.
        design: an emitted design; None: the best that fits the board.
        what_if: predict also what the compiler does not emit; the result says what that is.

    Raises:
        InputError: a figure or the decisions do not fit the workload, or it is not emitted.
        TargetError: the target lacks what the model needs.
        CompileError: the decoder does not fit the board.
    """
    question = ask(workload, target, decisions=decisions, design=design, what_if=what_if)
    board, trace, attended = question.board(ClosedForm), question.decisions, question.attended
    run = Run.of(board, trace, attended)
    variants = {
        "dense": Run.of(board, np.zeros_like(trace), attended),
        "static_mapping": Run.of(board, trace, attended, Mapping.STATIC),
    }
    return _result(question, run, {name: variant.seconds for name, variant in variants.items()})


def _macs(work: Workload, trace: Decisions) -> float:
    """Return the multiply-accumulates of a mean step: every linear for every row, the MLP for the rows that compute."""
    shape = work.shape
    mlp = sum(x.macs for x in shape.mlp_linears) * float((~trace).sum(axis=(1, 2)).mean())
    others = shape.layers * sum(x.macs for x in shape.attention_linears) + (shape.head.macs if shape.head else 0)
    return mlp + others * work.batch


def _result(question: Question, run: Run, seconds: dict[str, float]) -> Estimate:
    work, target, design, trace = question.workload, question.target, question.design, question.decisions
    power, peak = target.power, peak_bandwidth(target)
    macs = _macs(work, trace)
    joules = (run.bytes * power.dram_pj_per_byte + macs * power.mac_int8_pj) * 1e-12
    energy = (power.static_w * run.seconds + joules) / work.batch
    footprint = work.footprint()
    streaming = sum(run.busy.get(unit, 0.0) for unit in ("memory", "ports", "compute", "edge"))
    return Estimate(
        what_if=question.what_if,
        target=target.name,
        shape=work.shape.name,
        quant=work.quant,
        offload=work.offload,
        batch=work.batch,
        context=work.context,
        attended=work.attended,
        replay_ratio=float(trace.mean()),
        tokens_per_second=work.batch / run.seconds,
        seconds_per_step=run.seconds,
        bytes_per_step=run.bytes,
        macs_per_step=macs,
        bandwidth_utilisation=run.bytes / run.seconds / peak,
        weight_stream_utilisation=run.weight_bytes / streaming / peak if streaming else 0.0,
        energy_per_token_j=energy,
        power_w=energy * work.batch / run.seconds,
        bound_by=max(run.busy, key=lambda unit: run.busy[unit]),
        shares={unit: value / run.seconds for unit, value in run.busy.items()},
        speedup_over_dense=seconds["dense"] / run.seconds,
        comparison={name: work.batch / value for name, value in seconds.items()},
        gate=work.gate.to_json(work.shape, work.batch),
        memory={**asdict(footprint), "total": footprint.total, "capacity": capacity(target)},
        resources=resources_of(design, work.attention(), target),
        design=design.part.model_dump(mode="json"),
        time_line=[asdict(segment) for segment in run.typical.segments],
        exploration=question.found.part.model_dump(mode="json") if question.found else {},
    )
