"""One decode step on a board, segment by segment: sequenced by the host, or one launch of a kernel of whole steps."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files

from fastcar_compile.codegen.hls.design.controller import ControlOp
from fastcar_compile.codegen.hls.design.loops import LoadLoop
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.design.step_loops import AttendWork, VectorWork
from fastcar_compile.codegen.hls.model.engine import AttendCall, Call, CallPart, Engine, LoopCall
from fastcar_compile.codegen.hls.model.workload import GateModel, Workload
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program import replaying
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK
from fastcar_compile.codegen.hls.step_program.instruction import Instruction, Place
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import TargetError

SERVER_CORES = 8
"""Cores of a server host whose target says "as many as there are"."""


@dataclass(frozen=True)
class HostModel:
    """Rates of a host CPU.

    Args:
        stream_bandwidth: bytes per second that all cores together read of memory.
        int8_macs_per_cycle, flops_per_cycle: of one core.
        row_bytes_per_cycle: that one core loads and stores of rows in its first-level cache.
        call_seconds: of starting a kernel and seeing its end.
    """

    clock_ghz: float
    stream_bandwidth: float
    int8_macs_per_cycle: float
    flops_per_cycle: float
    row_bytes_per_cycle: float
    call_seconds: float
    source: str
    cores: int = 1

    def seconds(self, *, bytes_read: float = 0.0, int8_macs: float = 0.0, flops: float = 0.0) -> float:
        """Return the time of one piece of work over all cores: reading or computing, whichever is longer."""
        rate = self.cores * self.clock_ghz * 1e9
        compute = int8_macs / (rate * self.int8_macs_per_cycle) + flops / (rate * self.flops_per_cycle)
        return max(bytes_read / self.stream_bandwidth, compute)

    def row_seconds(self, moved: float) -> float:
        """Return the time of moving so many bytes of rows through one core.

        Norms and rotary embeddings are serial loops, whose loads and stores take longer than their arithmetic
        (codegen/tvm/kernels/norm).
        """
        return moved / (self.clock_ghz * 1e9 * self.row_bytes_per_cycle)


def host_of(target: Target) -> HostModel:
    """Return the model of a target's host.

    Raises:
        TargetError: there are no figures for its CPU.
    """
    table = tomllib.loads((files("fastcar_compile.codegen.hls.model") / "hosts.toml").read_text())
    if target.host.cpu not in table:
        what = f"there are no figures for the host {target.host.cpu} of {target.name}"
        raise TargetError(what, hint=f"known hosts: {', '.join(sorted(table))}")
    return HostModel(**table[target.host.cpu], cores=target.host.cores or SERVER_CORES)


NORM_BYTES = 28
"""What a norm and the residual add before it load and store per element, float32: two summands and their sum; the row
for the sum of squares; the row, its weight and the result (codegen/tvm/kernels/norm.py)."""

ROPE_BYTES = 16
"""The same per element of q and k: the element, cosine, sine, result (codegen/tvm/kernels/norm.py)."""


@dataclass(frozen=True)
class StepSegment:
    """A span of the time line. `unit` is what it waits for."""

    name: str
    layer: int
    unit: str
    start: float
    seconds: float
    bytes: float


STREAMING = ("memory", "ports", "compute", "edge")
"""Units of calls of the array, whose bytes are weights."""


def without_replay(program: StepProgram) -> StepProgram:
    """Return the program of the same decoder compiled without replay."""
    found: list[Instruction] = []
    for one in program.instructions:
        if isinstance(one, replaying.Replay):
            found.append(step.Add(one.layer, one.count))
        elif not isinstance(one, replaying.OF_REPLAY):
            found.append(one)
    return replace(program, instructions=tuple(found))


@dataclass(frozen=True)
class Board:
    """What runs the step of a workload.

    Args:
        gate: of every layer; None: the decoder is compiled without replay.
        program: of whole steps, without replay where there is no gate; None: the host sequences the calls.
    """

    engine: Engine
    host: HostModel
    work: Workload
    gate: GateModel | None = None
    program: StepProgram | None = None

    @cached_property
    def every(self) -> LoadLoop:
        """Every row computes."""
        return self.engine.design.load(self.work.batch)

    @property
    def unit_decides(self) -> bool:
        """Whether the TAS unit decides; else there is no gate, or the host decides."""
        return self.gate is not None and not self.gate.on_host

    @property
    def dense(self) -> Board:
        """The same board and array, and the same decoder compiled without replay: no gate, no cache."""
        return replace(self, gate=None, program=self.program and without_replay(self.program))


@dataclass
class StepCost:
    """The time line of one step and its sums.

    Attributes:
        kept: whether there is a time line; else there are only the sums. calls: the starts of the engine and the
            instructions, as spans of unit `call` over their segments.
    """

    kept: bool = True
    segments: list[StepSegment] = field(default_factory=list)
    seconds: float = 0.0
    bytes: float = 0.0
    weight_bytes: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: list[StepSegment] = field(default_factory=list)

    def add(self, name: str, layer: int, unit: str, seconds: float, moved: float = 0.0) -> None:
        """Append a segment."""
        if seconds <= 0:
            return
        if self.kept:
            self.segments.append(StepSegment(name, layer, unit, self.seconds, seconds, moved))
        self.seconds += seconds
        self.bytes += moved
        self.busy[unit] += seconds

    def call(self, name: str, layer: int, board: Board, call: Call) -> None:
        """Append one start of the engine: its launch, the controller, its rows, its weights."""
        self.add(f"start {name}", layer, "launch", board.host.call_seconds)
        self.instruction(layer, call.title, board.engine.parts_of(call))

    def instruction(self, layer: int, title: str, parts: Iterable[CallPart]) -> None:
        """Append what the engine does, without a launch."""
        start, moved = self.seconds, self.bytes
        for part in parts:
            self.weight_bytes += part.bytes if part.unit in STREAMING else 0.0
            self.add(part.name, layer, part.unit, part.seconds, part.bytes)
        if self.kept:
            self.calls.append(StepSegment(title, layer, "call", start, self.seconds - start, self.bytes - moved))


def simulate_step(board: Board, loads: Sequence[LoadLoop], attended: float, run: StepCost) -> StepCost:
    """Add the time line of one forward to `run` and return it. The host waits for every call of a kernel.

    Args:
        loads: per layer the rows that compute in the MLP; none: every row replays.
        attended: positions that attention reads.
    """
    simulation = _Simulation(board, run)
    for layer, load in enumerate(loads):
        simulation.layer(layer, load, attended)
    simulation.head()
    return run


class _Simulation:
    def __init__(self, board: Board, run: StepCost) -> None:
        self.board, self.work, self.shape, self.step = board, board.work, board.work.shape, run

    def layer(self, layer: int, load: LoadLoop, attended: float) -> None:
        board, shape, gate = self.board, self.shape, self.board.gate
        qkv, o = shape.attention_linears
        # A gate that reads the MLP's input decides behind the norm before the MLP, others before attention.
        late = gate is not None and gate.caches_input
        self._norm(layer)
        self._linear(qkv, layer)
        self._rows("rope", layer, ROPE_BYTES * (shape.heads + shape.kv_heads) * shape.head_dim)
        if board.unit_decides and not late:
            self._call("DRS", layer, board.engine.control_call(ControlOp.GATE))
        self._attention(layer, attended)
        self._linear(o, layer)
        if late:
            self._norm(layer)
        if gate is not None and gate.on_host:
            moved, flops = gate.moved_bytes(shape, self.work.batch), gate.flops(shape, self.work.batch)
            self.step.add("gate", layer, "host", board.host.seconds(bytes_read=moved, flops=flops), moved)
        elif late:
            self._call("DRS", layer, board.engine.control_call(ControlOp.GATE))
        if load.rows == 0:
            self._rows_of_cache("replay", layer, 1)
        else:
            if not late:
                self._norm(layer)
            self._call("mlp", layer, board.engine.array_call(shape.mlp_linears, load))
        if gate is not None:
            self._rows_of_cache("cache", layer, 2 if board.unit_decides and late else 1)

    def head(self) -> None:
        self._norm(self.shape.layers)
        if self.shape.head is not None:
            self._linear(self.shape.head, self.shape.layers)

    def _norm(self, layer: int) -> None:
        self._rows("norm", layer, NORM_BYTES * self.shape.hidden)

    def _rows(self, name: str, layer: int, moved: float) -> None:
        """Add work of the host on every row of the batch; it is in a cache, so it counts as no traffic."""
        self.step.add(name, layer, "host", self.board.host.row_seconds(moved * self.work.batch))

    def _linear(self, linear: LinearSpec, layer: int) -> None:
        if self.work.offload != "mlp":
            self._call(linear.name, layer, self.board.engine.array_call([linear], self.board.every))
            return
        size = linear.weight_bytes(self.work.quant)
        seconds = self.board.host.seconds(bytes_read=size, int8_macs=linear.macs * self.work.batch)
        self.step.add(linear.name, layer, "host", seconds, size)

    def _rows_of_cache(self, name: str, layer: int, times: int) -> None:
        """Add a copy of all rows on the host: out of the MLP cache, or into the slots of this forward."""
        moved = times * 2 * 4 * self.shape.hidden * self.work.batch
        self.step.add(name, layer, "host", self.board.host.seconds(bytes_read=moved), moved)

    def _call(self, name: str, layer: int, call: Call) -> None:
        self.step.call(name, layer, self.board, call)

    def _attention(self, layer: int, attended: float) -> None:
        shape = self.shape
        moved = self.work.kv_bytes(1) // shape.layers * attended
        flops = 4 * attended * shape.heads * shape.head_dim * self.work.batch
        self.step.add("attention", layer, "attention", self.board.host.seconds(bytes_read=moved, flops=flops), moved)


# One decode step of a kernel of whole steps: one launch, then instruction after instruction.


SAMPLE_BYTES = 16
"""What sampling loads and stores per logit: the largest is found, powers are stored, the sum is searched. Estimate."""

SAMPLE_FLOPS = 16
"""Operations of sampling per logit, most of them a power. Estimate."""


def run_program(
    times: ProgramTimes, loads: Sequence[LoadLoop], attended: float, drafts: Sequence[LoadLoop], run: StepCost
) -> StepCost:
    """Add the time line of one forward to `run` and return it: the host embeds, launches once and samples.

    Args:
        times: of a board's program. loads: per layer the rows that compute in the MLP. attended: rows of the cache
            that are filled. drafts: per layer the array's rows in a draft, two for each row that replays.
    """
    board = times.board
    host, shape, batch = board.host, board.work.shape, board.work.batch
    moved = 2 * 4 * shape.hidden * batch
    run.add("embed", 0, "host", host.seconds(bytes_read=moved), moved)
    run.add("start step", 0, "launch", host.call_seconds)
    positions = max(1, round(attended))
    of = {"every": [board.every] * (shape.layers + 1), "computing": loads, "draft": drafts}
    for number, (rows, layer) in enumerate(times.rows):
        timed = times.of(number, of[rows][layer], positions)
        if timed is not None:
            run.instruction(layer, *timed)
    if shape.vocab:
        logits = shape.vocab * batch
        seconds = host.row_seconds(SAMPLE_BYTES * logits) + host.seconds(flops=SAMPLE_FLOPS * logits)
        run.add("sample", shape.layers, "host", seconds)
    return run


def _rows(program: StepProgram) -> Iterator[str]:
    """Yield which rows each instruction has: "every", "computing" in the MLP, or those of the "draft"."""
    decided = False
    for instruction in program.instructions:
        decided = decided or isinstance(instruction, replaying.Decide)
        own = "computing" if decided or isinstance(instruction, step.Mlp) else "every"
        decided = decided and not isinstance(instruction, replaying.Replay)
        yield "draft" if isinstance(instruction, replaying.DraftRows) else own


Timed = tuple[str, tuple[CallPart, ...]]
"""Title and spans of a call."""


class ProgramTimes:
    """What the engine does for each instruction of a board's program.

    Hundreds of forwards differ in few instructions: what is known is kept by the instruction's place, as the hash of a
    call takes longer than a look at a place.
    """

    def __init__(self, board: Board, program: StepProgram) -> None:
        self.board, self.program = board, program
        self.rows = [(rows, one.layer) for rows, one in zip(_rows(program), program.instructions, strict=True)]
        self._known: dict[tuple[int, int, int, int], Timed | None] = {}

    def of(self, number: int, load: LoadLoop, positions: int) -> Timed | None:
        """Return title and spans of an instruction; None: it takes no time.

        Args:
            load: the rows that compute in its layer. positions: rows of the cache that are filled.
        """
        instruction = self.program.instructions[number]
        key = number, load.rows, load.passes, positions if type(instruction) is step.Attend else 0
        if key not in self._known:
            call = self._call(instruction, load, positions)
            self._known[key] = None if call is None else (call.title, self.board.engine.parts_of(call))
        return self._known[key]

    def _call(self, instruction: Instruction, load: LoadLoop, positions: int) -> Call | None:
        engine = self.board.engine
        match instruction:
            case step.Linear():
                stays = instruction.target is not Place.OUTPUT
                return engine.array_call([self._linear(instruction)], self.board.every, on_chip=True, stays=stays)
            case step.Mlp():
                linears = self.board.work.shape.mlp_linears
                return engine.array_call(linears, load, on_chip=True, stays=True) if load.rows else None
            case replaying.DraftRows():
                own = engine.design.drafts[f"layer_{instruction.layer}.draft"]
                return engine.draft_call(own, load) if load.rows else None
            case step.Attend():
                return AttendCall(self._attend(instruction, positions))
            case _:
                return self._vector(instruction, load)

    def _linear(self, instruction: step.Linear) -> LinearSpec:
        names = {(x.inputs, x.channels): x.name for x in self.board.work.shape.attention_linears}
        size = instruction.inputs, instruction.channels
        name = "head" if instruction.target is Place.OUTPUT else names.get(size, "linear")
        return LinearSpec(name, *size)

    def _attend(self, instruction: step.Attend, filled: int) -> AttendWork:
        queries = instruction.heads // instruction.key_heads
        group = min(self.board.engine.design.group, queries)
        rows, ports = self.board.work.batch, self.board.engine.design.ports
        whole = -(-filled // BLOCK) * BLOCK  # tiles of values; so few forwards differ
        positions = min(whole, instruction.sinks + instruction.ring)
        share = self.board.engine.design.share
        return AttendWork(rows, instruction.key_heads, queries, group, instruction.blocks, ports, positions, share)

    def _vector(self, instruction: Instruction, load: LoadLoop) -> LoopCall | None:
        engine, rows = self.board.engine, self.board.work.batch
        work = VectorWork(rows, load.rows, engine.design.ports, engine.design.axi_words, engine.control)
        parts = instruction.loops(work)
        return LoopCall(instruction.name.lower().replace("_", " "), parts) if parts else None
