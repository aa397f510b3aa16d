"""The system simulator: one decode step of a board as a time line of engine, host and attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.dram import peak_bandwidth
from fastcar_compile.codegen.hls.design.exploration import resources_of
from fastcar_compile.codegen.hls.design.footprint import capacity
from fastcar_compile.errors import UserError
from fastcar_compile.estimate.engine import ClosedForm
from fastcar_compile.estimate.prediction import Prediction, Runs
from fastcar_compile.estimate.question import Question, ask
from fastcar_compile.estimate.rows import Decisions
from fastcar_compile.estimate.workload import Offload, Workload
from fastcar_compile.targets import Target


@dataclass(frozen=True, kw_only=True)
class Estimate(Prediction):
    """A prediction by the closed form. Sizes in bytes, energy in joules; shares of one.

    Attributes:
        attended: positions that attention reads, at most `context`.
        bandwidth_utilisation: bytes moved over the whole step, against the peak of the weight memories.
        weight_stream_utilisation: the same of weights alone, over the time in which the engine works.
        bound_by: memory, ports, compute, drs, launch, host, attention (on the host), attend (in the fabric) or vector:
            what takes the largest share of the step.
        shares: unit -> share of the step.
        gate: name, what decides, units of its network, bytes of its cache and of its weights, all layers.
        exploration: what was compared to find the design; empty for a given design.
    """

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
    resources: dict[str, Any]
    design: dict[str, Any]
    exploration: dict[str, Any] = field(default_factory=dict)


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
    return estimate_question(ask(workload, target, decisions=decisions, design=design, what_if=what_if))


def default_offload(workload: Workload, target: Target, *, what_if: bool = False) -> Offload:
    """Return what the accelerator computes where nobody says: "all", or "linears" where that takes less time; or "mlp".

    A whole step has int8 keys and values and decides in the fabric; other decoders have "mlp". The times are those of a
    dense step, so the workload's replay plays no part. A form that does not fit the board is left out.
    """
    if workload.kv != "int8" or workload.gate.on_host:
        return "mlp"
    seconds = dict[Offload, float]()
    for offload in ("all", "linears"):
        work = replace(workload, offload=offload, replay=0.0)
        try:
            seconds[offload] = estimate(work, target, what_if=what_if).seconds_per_step
        except UserError:
            continue
    return min(seconds, key=seconds.__getitem__) if seconds else "all"


def estimate_question(question: Question) -> Estimate:
    """Predict the decode speed that a question asks for."""
    return _result(question, Runs.of(question, question.board(ClosedForm), static=True))


def _macs(work: Workload, trace: Decisions) -> float:
    """Return the multiply-accumulates of a mean step: every linear for every row, the MLP for the rows that compute."""
    shape = work.shape
    mlp = sum(x.macs for x in shape.mlp_linears) * float((~trace).sum(axis=(1, 2)).mean())
    others = shape.layers * sum(x.macs for x in shape.attention_linears) + (shape.head.macs if shape.head else 0)
    return mlp + others * work.batch


def _result(question: Question, runs: Runs) -> Estimate:
    work, target, design, run = question.workload, question.target, question.design, runs.step
    power, peak = target.power, peak_bandwidth(target)
    macs = _macs(work, question.decisions)
    joules = (run.bytes * power.dram_pj_per_byte + macs * power.mac_int8_pj) * 1e-12
    energy = (power.static_w * run.seconds + joules) / work.batch
    footprint = work.footprint(target)
    return Estimate(
        **runs.common(question, design.mlp.cores),
        attended=work.attended,
        bytes_per_step=run.bytes,
        macs_per_step=macs,
        bandwidth_utilisation=run.bytes / run.seconds / peak,
        weight_stream_utilisation=run.weight_bytes / run.streaming / peak if run.streaming else 0.0,
        energy_per_token_j=energy,
        power_w=energy * work.batch / run.seconds,
        bound_by=max(run.busy, key=lambda unit: run.busy[unit]),
        shares={unit: value / run.seconds for unit, value in run.busy.items()},
        gate=work.gate.to_json(work.shape, work.batch),
        memory={**asdict(footprint), "total": footprint.total, "capacity": capacity(target)},
        resources=resources_of(design, work.kernel_spec().controller, target, question.buffers),
        design=design.part.model_dump(mode="json"),
        exploration=question.found.part.model_dump(mode="json") if question.found else {},
    )
