"""The system simulator: one decode step of a board as a time line of engine, host and attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design.controller import controller_cycles
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.dram import peak_bandwidth
from fastcar_compile.codegen.hls.design.exploration import explore, resources_of
from fastcar_compile.codegen.hls.design.footprint import Footprint, capacity, require_fit
from fastcar_compile.codegen.hls.design.spec import LinearSpec, MlpSpec
from fastcar_compile.drs.table import AttentionShape, DrsTable, build_table
from fastcar_compile.errors import InputError
from fastcar_compile.estimate.engine import Engine
from fastcar_compile.estimate.gate import TAS, GateModel
from fastcar_compile.estimate.host import host_of
from fastcar_compile.estimate.shapes import DecoderShape
from fastcar_compile.estimate.step import Board, Step, simulate_step
from fastcar_compile.formats.quant import ACCELERATED
from fastcar_compile.targets import Target

Offload = Literal["mlp", "linears", "all"]
Decisions = NDArray[np.bool_]

SYNTHETIC_FORWARDS = 200
"""Forwards of the decisions made for a given replay ratio: it is met to half a percent."""


@dataclass(frozen=True)
class Workload:
    """What is decoded and how.

    Args:
        context: positions that attention reads.
        batch: rows B.
        offload: what the fabric computes: the MLPs; every linear; or, "all", attention over an int8 cache as well, as
            published accelerators do. No attention kernel is emitted by this compiler.
        kv_bits: bits of one cached key or value element.
        kv_block: elements that share an exponent of one byte beside those; 0: none do.
        replay: share of (forward, layer, row) that replays, all forwards counted.
        sink_window: sinks and window of sparse attention, tokens; None: attention over the whole context.
        kv_rows: rows of a key or value cache; None: as many as attention reads.
        gate: what decides, where something replays.
    """

    shape: DecoderShape
    quant: str
    context: int
    batch: int = 1
    offload: Offload = "all"
    kv_bits: int = 8
    kv_block: int = 0
    replay: float = 0.0
    sink_window: tuple[int, int] | None = None
    kv_rows: int | None = None
    gate: GateModel = TAS

    def check(self) -> None:
        """Raise InputError when a figure is out of range."""
        wrong = []
        if not 0 <= self.replay <= 1:
            wrong.append(f"replay = {self.replay} (0 to 1)")
        if self.context < 1:
            wrong.append(f"context = {self.context} (at least 1)")
        if not 1 <= self.batch <= 32:
            wrong.append(f"batch = {self.batch} (1 to 32)")
        if self.quant not in ACCELERATED:
            wrong.append(f'quant = "{self.quant}" (the engine is int8: {" or ".join(ACCELERATED)})')
        if self.kv_bits not in (8, 16, 32):
            wrong.append(f"kv_bits = {self.kv_bits} (8, 16 or 32)")
        if wrong:
            raise InputError(f"the estimate cannot be made: {'; '.join(wrong)}", hint="change the values named")

    @property
    def attended(self) -> int:
        """Positions that attention reads."""
        return self.context if self.sink_window is None else min(self.context, sum(self.sink_window))

    def attention(self) -> AttentionShape:
        """Return what the TAS unit is built for."""
        return AttentionShape(self.shape.heads, self.shape.kv_heads, self.shape.head_dim)

    def control_table(self, cores: int) -> DrsTable:
        """Return a control table of these sizes, every layer with a gate."""
        layers = self.shape.layers
        return build_table(
            *(layers, self.batch, cores, self.shape.tokens_per_frame),
            [0.0] * layers,
            attention=self.attention(),
            scales=[1.0] * layers,
        )

    def mlp_spec(self) -> MlpSpec:
        """Return the MLP that the engine is built for."""
        shape = self.shape
        return MlpSpec(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            batch=self.batch,
            layers=shape.layers,
            cores=1,
            activation=shape.activation,
            gated=shape.gated,
            quant=self.quant,
        )

    def linear_specs(self) -> list[LinearSpec]:
        """Return the other linears that the engine computes; none where only MLPs are offloaded."""
        if self.offload == "mlp":
            return []
        shape, layers = self.shape, range(self.shape.layers)
        specs = [
            LinearSpec(f"layer_{n}.{x.name}", x.inputs, x.outputs) for n in layers for x in shape.attention_linears
        ]
        return specs + ([LinearSpec("head", shape.head.inputs, shape.head.outputs)] if shape.head else [])

    def kv_bytes(self, positions: int) -> int:
        """Return the bytes of this many cached positions, all layers and rows."""
        return self.shape.kv_bytes(positions, self.batch, self.kv_bits, self.kv_block)

    def footprint(self) -> Footprint:
        """Return the memory that it needs on the board."""
        return Footprint(
            self.shape.weight_bytes(self.quant) + self.gate.weight_bytes(self.shape),
            self.kv_bytes(self.kv_rows or self.attended),
            self.shape.mlp_cache_bytes(self.batch),
            self.gate.cache_bytes(self.shape, self.batch),
        )


@dataclass(frozen=True)
class Estimate:
    """A prediction. Times in seconds, sizes in bytes, energy in joules; shares of one.

    Attributes:
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
    check_memory: bool = True,
) -> Estimate:
    """Predict the decode speed of a workload on a board.

    Args:
        decisions: bool [forwards, layers, rows], True where a row replayed (`session.stats.decisions`); forward t then
            attends to t + 1 positions, at most `context`. None: decisions drawn for `workload.replay`.
        design: an emitted design; None: the best that fits the board.
        check_memory: refuse what does not fit the board's memory.

    Raises:
        InputError: a figure or the decisions do not fit the workload.
        TargetError: the target lacks what the model needs.
        CompileError: the decoder does not fit the board.
    """
    workload.check()
    if check_memory:
        require_fit(workload.footprint(), target, quant=workload.quant, positions=workload.kv_rows or workload.attended)
    found = None
    if design is None:
        found = explore(workload.mlp_spec(), target, workload.attention(), workload.linear_specs())
        design = found.design
    gated = workload.replay > 0 if decisions is None else bool(decisions.any())
    board = _board(workload, target, design, gated)
    trace = synthetic_decisions(workload) if decisions is None else _checked(decisions, workload)
    attended = np.full(len(trace), workload.attended)
    if decisions is not None:
        attended = np.minimum(attended, np.arange(1, len(trace) + 1))
    run = _Run.of(board, trace, attended)
    variants = {
        "dense": _Run.of(board, np.zeros_like(trace), attended),
        "static_mapping": _Run.of(board, trace, attended, drs=False),
        "no_prefetch": _Run.of(board, trace, attended, prefetch=False),
        "static_no_prefetch": _Run.of(board, trace, attended, drs=False, prefetch=False),
    }
    seconds = {name: variant.seconds for name, variant in variants.items()}
    result = _result(workload, target, design, trace, run, seconds)
    return replace(result, exploration=found.part.model_dump(mode="json")) if found else result


def _board(workload: Workload, target: Target, design: Design, gated: bool) -> Board:
    """Return the board. `gated`: whether the TAS unit and DRS controller, or the host, decide; a dense decoder has
    none."""
    engine, on_host = Engine.of(design, target), workload.gate.on_host
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
    generator = np.random.default_rng(0)
    shape = (SYNTHETIC_FORWARDS, workload.shape.layers, workload.batch)
    ranks = generator.random(shape).argsort(0).argsort(0)
    return ranks < round(workload.replay * SYNTHETIC_FORWARDS)


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
        drs: bool = True,
        prefetch: bool = True,
    ) -> _Run:
        """Return the means; forwards of equal load are simulated once, at their mean of attended positions."""
        loads = np.array([[board.engine.load(tuple(rows), drs=drs) for rows in layers] for layers in trace.tolist()])
        kinds, kind_of, counts = np.unique(loads, axis=0, return_inverse=True, return_counts=True)
        means = np.bincount(kind_of.reshape(-1), attended) / counts
        steps = [simulate_step(board, k.tolist(), m, prefetch=prefetch) for k, m in zip(kinds, means, strict=True)]
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
