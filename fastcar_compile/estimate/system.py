"""The system simulator: one decode step of a board as a time line of engine, host and attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design.controller import controller_cycles
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.dram import peak_bandwidth
from fastcar_compile.codegen.hls.design.exploration import explore, resources_of
from fastcar_compile.codegen.hls.design.footprint import GB, capacity, require_fit
from fastcar_compile.errors import InputError
from fastcar_compile.estimate.engine import ClosedForm, EngineModel, RowLoad
from fastcar_compile.estimate.host import host_of
from fastcar_compile.estimate.rows import Decisions, Mapping, draw_decisions, passes_of
from fastcar_compile.estimate.step import Board, Step, simulate_step
from fastcar_compile.estimate.workload import Workload
from fastcar_compile.targets import Target

SYNTHETIC_FORWARDS = 200
"""Forwards of the decisions made for a given replay ratio: it is met to half a percent."""


@dataclass(frozen=True)
class Estimate:
    """A prediction. Times in seconds, sizes in bytes, energy in joules; shares of one.

    Attributes:
        what_if: what was asked for that the compiler does not emit, as texts; empty: this is an emitted design.
        attended: positions that attention reads, at most `context`.
        bandwidth_utilisation: bytes moved over the whole step, against the peak of the weight memories.
        weight_stream_utilisation: the same of weights alone, over the time in which the engine works.
        bound_by: memory, ports, compute, host or attention: what takes the largest share of the step.
        shares: unit -> share of the step.
        comparison: tokens per second of the same workload dense, with static mapping, and without prefetch.
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
    model: type[EngineModel] | None = None,
) -> Estimate:
    """Predict the decode speed of a workload on a board.

    Args:
        decisions: bool [forwards, layers, rows], True where a row replayed (`session.stats.decisions`); forward t then
            attends to t + 1 positions, at most `context`. None: decisions drawn for `workload.replay`.
        design: an emitted design; None: the best that fits the board.
        what_if: predict also what the compiler does not emit; the result says what that is.
        model: of the engine; None: the closed form.

    Raises:
        InputError: a figure or the decisions do not fit the workload, or it is not emitted.
        TargetError: the target lacks what the model needs.
        CompileError: the decoder does not fit the board.
    """
    workload.check()
    reasons = _require_emitted(workload, target, what_if=what_if)
    found = None
    if design is None:
        found = explore(workload.mlp_spec(), target, workload.attention(), workload.linear_specs())
        design = found.design
    gated = workload.replay > 0 if decisions is None else bool(decisions.any())
    board = _board(workload, target, (model or ClosedForm)(design, target), gated)
    trace = synthetic_decisions(workload) if decisions is None else _checked(decisions, workload)
    attended = np.full(len(trace), workload.attended)
    if decisions is not None:
        attended = np.minimum(attended, np.arange(1, len(trace) + 1))
    fetches = gated and not workload.gate.on_host  # only the controller issues PREFETCH_NEXT, for gates that it decides
    run = _Run.of(board, trace, attended, prefetch=fetches)
    variants = {
        "dense": _Run.of(board, np.zeros_like(trace), attended, prefetch=False),
        "static_mapping": _Run.of(board, trace, attended, drs=False, prefetch=fetches),
        "no_prefetch": _Run.of(board, trace, attended, prefetch=False),
        "static_no_prefetch": _Run.of(board, trace, attended, drs=False, prefetch=False),
    }
    seconds = {name: variant.seconds for name, variant in variants.items()}
    result = replace(_result(workload, target, design, trace, run, seconds), what_if=reasons)
    return replace(result, exploration=found.part.model_dump(mode="json")) if found else result


def _require_emitted(workload: Workload, target: Target, *, what_if: bool) -> tuple[str, ...]:
    """Return what the workload asks for that the compiler does not emit; refuse it unless `what_if`."""
    reasons, footprint = workload.what_if(), workload.footprint()
    if reasons and not what_if:
        raise InputError(
            f"the compiler does not emit this: {'; '.join(reasons)}",
            hint="choose offload mlp or linears, or ask with what_if=True (--what-if)",
        )
    if not what_if:
        require_fit(footprint, target, quant=workload.quant, positions=workload.kv_rows or workload.attended)
    if footprint.total > (room := capacity(target)):
        return *reasons, f"memory of {footprint.total / GB:.2f} GB: the board has room for {room / GB:.2f} GB"
    return reasons


def _board(workload: Workload, target: Target, engine: EngineModel, gated: bool) -> Board:
    """Return the board. `gated`: whether the TAS unit and DRS controller, or the host, decide; a dense decoder has
    none."""
    on_host = workload.gate.on_host
    unit_seconds = controller_cycles(workload.control_table(engine.cores)) / engine.clock_hz
    return Board(
        engine,
        host_of(target),
        workload.shape,
        workload.quant,
        workload.batch,
        fabric_linears=workload.offload in ("linears", "all"),
        fabric_attention=workload.offload == "all",
        controller_seconds=unit_seconds if gated and not on_host else 0.0,
        gate=workload.gate if gated and on_host else None,
        kv_bytes=workload.kv_bytes(1) // workload.shape.layers,
    )


def synthetic_decisions(workload: Workload) -> Decisions:
    """Return decisions [200, layers, rows] of the workload's replay ratio, exact per layer and row."""
    return draw_decisions((SYNTHETIC_FORWARDS, workload.shape.layers, workload.batch), workload.replay)


def _checked(decisions: Decisions, workload: Workload) -> Decisions:
    expected = (workload.shape.layers, workload.batch)
    if decisions.dtype != np.bool_ or decisions.ndim != 3 or decisions.shape[1:] != expected or not len(decisions):
        raise InputError(
            f"the decisions are {decisions.dtype} {list(decisions.shape)}, "
            f"expected bool [forwards, {expected[0]} layers, {expected[1]} rows]",
            hint="give session.stats.decisions of a session of this decoder with record=True",
        )
    return decisions


@dataclass(frozen=True)
class _Run:
    """All forwards of a trace: means per step, and the step nearest to the mean."""

    seconds: float
    bytes: float
    weight_bytes: float
    busy: dict[str, float]
    typical: Step

    @classmethod
    def of(
        cls,
        board: Board,
        trace: Decisions,
        attended: NDArray[np.integer],
        *,
        prefetch: bool,
        drs: bool = True,
    ) -> _Run:
        """Return the means; forwards of equal load are simulated once, at their mean of attended positions."""
        mapping = Mapping.DRS if drs else Mapping.STATIC
        loads = np.stack([(~trace).sum(-1), passes_of(trace, board.engine.cores, mapping)], axis=-1)
        kinds, kind_of, counts = np.unique(loads, axis=0, return_inverse=True, return_counts=True)
        means = np.bincount(kind_of.reshape(-1), attended) / counts
        steps = [
            simulate_step(board, [RowLoad(*layer) for layer in kind], mean_attended, prefetch=prefetch)
            for kind, mean_attended in zip(kinds.tolist(), means, strict=True)
        ]
        share = counts / counts.sum()

        def mean(values: list[float]) -> float:
            return float(np.dot(share, values))

        seconds = mean([s.seconds for s in steps])
        units = sorted({unit for s in steps for unit in s.busy})
        return cls(
            seconds,
            mean([s.bytes for s in steps]),
            mean([s.weight_bytes for s in steps]),
            {unit: mean([s.busy.get(unit, 0.0) for s in steps]) for unit in units},
            min(steps, key=lambda s: abs(s.seconds - seconds)),
        )


def _macs(work: Workload, trace: Decisions) -> float:
    """Return the multiply-accumulates of a mean step: every linear for every row, the MLP for the rows that compute."""
    shape = work.shape
    mlp = sum(x.macs for x in shape.mlp_linears) * float((~trace).sum(axis=(1, 2)).mean())
    others = shape.layers * sum(x.macs for x in shape.attention_linears) + (shape.head.macs if shape.head else 0)
    return mlp + others * work.batch


def _result(
    work: Workload, target: Target, design: Design, trace: Decisions, run: _Run, seconds: dict[str, float]
) -> Estimate:
    power, peak = target.power, peak_bandwidth(target)
    macs = _macs(work, trace)
    joules = (run.bytes * power.dram_pj_per_byte + macs * power.mac_int8_pj) * 1e-12
    energy = (power.static_w * run.seconds + joules) / work.batch
    footprint = work.footprint()
    streaming = sum(run.busy.get(unit, 0.0) for unit in ("memory", "ports", "compute", "edge"))
    return Estimate(
        what_if=(),
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
    )
