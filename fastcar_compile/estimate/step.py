"""One decode step on a board, segment by segment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastcar_compile.estimate.call import EngineCall
from fastcar_compile.estimate.engine import EngineModel, RowLoad
from fastcar_compile.estimate.gate import GateModel
from fastcar_compile.estimate.host import HostModel
from fastcar_compile.estimate.shapes import DecoderShape, LinearShape

NORM_BYTES = 28
"""What a norm and the residual add before it load and store per element, float32: two summands and their sum; the row
for the sum of squares; the row, its weight and the result (codegen/tvm/kernels/norm/norm.py)."""

ROPE_BYTES = 16
"""The same per element of q and k: the element, cosine, sine, result (codegen/tvm/kernels/norm/rotary.py)."""


@dataclass(frozen=True)
class Segment:
    """A span of the time line. `unit` is what it waits for."""

    name: str
    layer: int
    unit: str
    start: float
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Board:
    """What runs the step.

    Args:
        kv_bytes: of one position of one layer's key and value caches, all rows.
        controller_seconds: of one call of the TAS unit and DRS controller.
        unit_decides: whether that unit decides in every layer. Else the launch of the MLP places its rows.
        gate: where the host decides, and in every layer; None: it does not.
    """

    engine: EngineModel
    host: HostModel
    shape: DecoderShape
    quant: str
    batch: int
    fabric_linears: bool
    fabric_attention: bool
    kv_bytes: int
    controller_seconds: float
    unit_decides: bool
    gate: GateModel | None = None


@dataclass
class Step:
    """The time line of one step and its sums. `calls`: when the engine started with what."""

    segments: list[Segment] = field(default_factory=list)
    seconds: float = 0.0
    bytes: float = 0.0
    weight_bytes: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: list[tuple[float, EngineCall]] = field(default_factory=list)

    def add(self, name: str, layer: int, unit: str, seconds: float, moved: float = 0.0) -> None:
        """Append a segment."""
        if seconds <= 0:
            return
        self.segments.append(Segment(name, layer, unit, self.seconds, seconds, moved))
        self.seconds += seconds
        self.bytes += moved
        self.busy[unit] += seconds


def simulate_step(board: Board, loads: Sequence[RowLoad], attended: float) -> Step:
    """Return the time line of one forward.

    The host waits for every call of a kernel. Filling the prefetch buffer is one of those: it takes the memory as long
    as it spares the next layer, so it is left out.

    Args:
        loads: per layer the rows that compute in the MLP; none: every row replays.
        attended: positions that attention reads.
    """
    run = _Simulation(board)
    for layer, load in enumerate(loads):
        run.layer(layer, load, attended)
    run.head()
    return run.step


class _Simulation:
    def __init__(self, board: Board) -> None:
        self.board, self.step = board, Step()

    def layer(self, layer: int, load: RowLoad, attended: float) -> None:
        board, shape = self.board, self.board.shape
        qkv, o = shape.attention_linears
        self._norm(layer)
        self._linear(qkv, layer)
        width = (shape.heads + shape.kv_heads) * shape.head_dim
        self._rows("rope", layer, ROPE_BYTES * width)
        if board.unit_decides:
            self._control(layer)
        self._attention(layer, attended)
        self._linear(o, layer)
        norm_done = self._gate(layer)
        if load.rows == 0:
            self._copy(layer)
            return
        if not norm_done:
            self._norm(layer)
        self._call("mlp", layer, self.board.shape.mlp_linears, load)

    def head(self) -> None:
        shape = self.board.shape
        self._norm(shape.layers)
        if shape.head is not None:
            self._linear(shape.head, shape.layers)

    def _gate(self, layer: int) -> bool:
        """Add what the host does for a decision; return whether the MLP's norm was computed for it."""
        board, shape = self.board, self.board.shape
        if board.gate is None:
            return False
        if board.gate.caches_input:
            self._norm(layer)
        if board.gate.on_host:
            moved = board.gate.moved_bytes(shape, board.batch)
            seconds = board.host.seconds(bytes_read=moved, flops=board.gate.flops(shape, board.batch))
            self.step.add("gate", layer, "host", seconds, moved)
        return board.gate.caches_input

    def _norm(self, layer: int) -> None:
        self._rows("norm", layer, NORM_BYTES * self.board.shape.hidden)

    def _rows(self, name: str, layer: int, moved: float) -> None:
        """Add work of the host on every row of the batch; it is in a cache, so it counts as no traffic."""
        self.step.add(name, layer, "host", self.board.host.row_seconds(moved * self.board.batch))

    def _linear(self, linear: LinearShape, layer: int) -> None:
        board = self.board
        if board.fabric_linears:
            self._call(linear.name, layer, [linear], RowLoad(board.batch, -(-board.batch // board.engine.cores)))
            return
        size = linear.weight_bytes(board.quant)
        seconds = board.host.seconds(bytes_read=size, int8_macs=linear.macs * board.batch)
        self.step.add(linear.name, layer, "host", seconds, size)

    def _control(self, layer: int) -> None:
        """Add a call of the TAS unit and DRS controller."""
        self.step.add("start DRS", layer, "launch", self.board.host.call_seconds)
        self.step.add("TAS, DRS", layer, "drs", self.board.controller_seconds)

    def _copy(self, layer: int) -> None:
        """Add a replay: the rows are copied where they are."""
        moved = 2 * 4 * self.board.shape.hidden * self.board.batch
        self.step.add("replay", layer, "host", self.board.host.seconds(bytes_read=moved), moved)

    def _call(self, name: str, layer: int, linears: Sequence[LinearShape], load: RowLoad) -> None:
        """Add one start of the engine: its registers, its rows, its weights."""
        board = self.board
        self.step.add(f"start {name}", layer, "launch", board.host.call_seconds)
        call = board.engine.call_of(linears, load)
        self.step.calls.append((self.step.seconds, call))
        for part in board.engine.parts_of(call):
            self.step.weight_bytes += part.bytes
            self.step.add(part.name, layer, part.unit, part.seconds, part.bytes)

    def _attention(self, layer: int, attended: float) -> None:
        board, shape = self.board, self.board.shape
        moved = board.kv_bytes * attended
        if board.fabric_attention:
            self.step.add("attention", layer, "attention", moved / board.engine.stream_rate, moved)
            return
        flops = 4 * attended * shape.heads * shape.head_dim * board.batch
        self.step.add("attention", layer, "attention", board.host.seconds(bytes_read=moved, flops=flops), moved)
