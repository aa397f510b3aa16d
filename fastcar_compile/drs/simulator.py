"""Dynamic Resource Scheduling in Python: what the HLS controller must dispatch, record by record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastcar_compile.drs.gate import Array, Operands, decide
from fastcar_compile.drs.reader import Header, check, gate_of, header_of, layer_program, words_of
from fastcar_compile.drs.table import NONE, DrsTable, Instruction, Limits, Opcode, Status
from fastcar_compile.errors import InternalError

CAPACITY = 128
"""Records that the queue holds unless told otherwise: as many as instructions of a layer."""


class Place(NamedTuple):
    """Where a row computes: on core `core`, in pass `pass_number` over the weights of a tile."""

    core: int
    pass_number: int


@dataclass(frozen=True)
class DispatchRecord:
    """One dispatched instruction; row, core or pass is None where the instruction has none.

    `argument` is in bytes: of PREFETCH_NEXT how much of the next layer's weights to fetch into the prefetch buffer, of
    LOAD_WEIGHTS how much of this layer's the buffer already holds.
    """

    opcode: Opcode
    row: int | None
    core: int | None
    pass_number: int | None = None
    argument: int = 0

    @property
    def words(self) -> tuple[int, int]:
        """The record as the controller writes it.

        opcode << 24 | row << 16 | core << 8 | pass, with 0xFF for none; argument.
        """
        places = (self.row, self.core, self.pass_number)
        row, core, number = (NONE if value is None else value for value in places)
        return self.opcode << 24 | row << 16 | core << 8 | number, self.argument

    @classmethod
    def from_words(cls, word: int, argument: int) -> DispatchRecord:
        """Return the record of two such words."""
        row, core, number = (None if (word >> shift & NONE) == NONE else word >> shift & NONE for shift in (16, 8, 0))
        return cls(Opcode(word >> 24), row, core, number, argument)


@dataclass(frozen=True)
class DispatchTrace:
    """What one layer's scheduling did.

    Args:
        status: OK, or why nothing (QUEUE_FULL: not everything) was dispatched.
        records: in the order of dispatch.
        mapping: core and pass of each row; a replayed row's Mapping Register is 0. Empty unless the table was readable.
        held: layer in the prefetch buffer afterwards; None: none. Unchanged unless the status is OK.
    """

    status: Status
    records: tuple[DispatchRecord, ...] = ()
    mapping: tuple[Place, ...] = ()
    held: int | None = None


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of the controller.

    Args:
        layer: index of the decoder layer. step: decode forward number t.
        query: memory words of q (`gate.pack_heads`) and of x (`scores.pack_row`), what the gate reads of them.
        key: those of the cached key and of the cached x.
        chain: int32 [at least B], replays in a row at slot t mod F.
        held: layer in the prefetch buffer; None: none.
        mask: bit b = 1: row b computes; of a layer without a gate.
        network: memory words of the layer's network (`scores.pack_network`), for gate `learned`.
    """

    layer: int
    step: int
    query: Array
    key: Array
    chain: Array
    held: int | None = None
    mask: int = 0xFFFFFFFF
    network: Array | None = None


@dataclass(frozen=True)
class LayerTrace:
    """What one call of the controller answers: scores (float32 values) and new chain counts of every row of the table.

    With a status other than OK and QUEUE_FULL nothing was decided: the register is 0, scores and chain are empty.
    """

    status: Status
    index_register: int = 0
    scores: tuple[float, ...] = ()
    chain: tuple[int, ...] = ()
    records: tuple[DispatchRecord, ...] = ()
    held: int | None = None


def map_rows(index_register: int, rows: int, cores: int) -> tuple[Place, ...]:
    """Return the Mapping Registers: the i-th row that computes goes to core i mod `cores` in pass i div `cores`."""
    mapping, computing = [Place(0, 0)] * rows, 0
    for row in range(rows):
        if index_register >> row & 1:
            mapping[row] = Place(computing % cores, computing // cores)
            computing += 1
    return tuple(mapping)


def simulate(
    table: DrsTable | bytes,
    layer: int,
    index_register: int,
    *,
    held: int | None = None,
    limits: Limits | None = None,
    capacity: int = CAPACITY,
) -> DispatchTrace:
    """Schedule one layer whose Index Register is known.

    Args:
        table: a table, or its bytes (then they are checked, and a fault is a status, not an exception).
        index_register: bit b = 1: row b computes; bits at or beyond the table's rows are ignored.
        held: layer in the prefetch buffer; None: none.
        limits: of the hardware; a table that needs more has status BAD_HEADER. None: those of the format.
        capacity: records that the queue holds.
    """
    data = table if isinstance(table, bytes) else table.to_bytes()
    status = check(data, limits)
    if status is Status.OK and not 0 <= layer < header_of(data).layers:
        status = Status.BAD_LAYER
    if status is not Status.OK:
        return DispatchTrace(status, held=held)
    return _dispatch(data, layer, index_register, held, capacity)


def run_layer(
    table: DrsTable | bytes, call: LayerCall, *, limits: Limits | None = None, capacity: int = CAPACITY
) -> LayerTrace:
    """Return what the HLS controller answers to one call with this table: TAS, gate, Index Register, mapping, dispatch.

    Of a table that it does not load, it is the answer to the load.
    """
    data = table if isinstance(table, bytes) else table.to_bytes()
    status = check(data, limits)
    if status is not Status.OK:
        return LayerTrace(status, held=call.held)
    header = header_of(data)
    if not 0 <= call.layer < header.layers:
        return LayerTrace(Status.BAD_LAYER, held=call.held)
    gate = gate_of(data, call.layer)
    if gate.factor != 0 and not _operands_fit(header, call):
        return LayerTrace(Status.BAD_OPERANDS, held=call.held)
    operands = Operands(call.query, call.key, call.network)
    decision = decide(gate, call.step, operands, call.chain[: header.rows], mask=call.mask)
    trace = _dispatch(data, call.layer, decision.index_register, call.held, capacity)
    return LayerTrace(
        status=trace.status,
        index_register=decision.index_register,
        scores=tuple(decision.scores.tolist()),
        chain=tuple(decision.chain.tolist()),
        records=trace.records,
        held=trace.held,
    )


def _operands_fit(header: Header, call: LayerCall) -> bool:
    return (header.query_words, header.key_words) == (len(call.query), len(call.key))


def _dispatch(data: bytes, layer: int, index_register: int, held: int | None, capacity: int) -> DispatchTrace:
    """Discard or dispatch each instruction of a layer of a checked table."""
    header, words = header_of(data), words_of(data)
    program = layer_program(words, layer)
    if program is None:
        raise InternalError(f"layer {layer} of a DRS table that was checked has no instructions")
    register = index_register & (1 << header.rows) - 1
    mapping = map_rows(register, header.rows, header.cores)
    prefetch = _PrefetchBuffer(words[header.prefetch : header.programs], layer, held)
    records = []
    for instruction in program[:-1]:
        if _is_issued(instruction, register) and prefetch.allows(instruction.opcode):
            if len(records) == capacity:
                return DispatchTrace(Status.QUEUE_FULL, tuple(records), mapping, held)
            records.append(_record(instruction, mapping, prefetch.issue(instruction.opcode)))
    return DispatchTrace(Status.OK, tuple(records), mapping, prefetch.held)


class _PrefetchBuffer:
    """The one on-chip buffer: it holds the beginning of one layer's weight stream, or nothing."""

    def __init__(self, sizes: Sequence[int], layer: int, held: int | None) -> None:
        self._sizes, self._layer, self.held = sizes, layer, held
        self._next = (layer + 1) % len(sizes)

    def allows(self, opcode: Opcode) -> bool:
        """Return whether an instruction is dispatched: PREFETCH_NEXT is not when there is nothing to fetch."""
        return opcode is not Opcode.PREFETCH_NEXT or (self._sizes[self._layer] != 0 and self.held != self._next)

    def issue(self, opcode: Opcode) -> int:
        """Change the content as the instruction does; returns the record's argument."""
        if opcode is Opcode.PREFETCH_NEXT:
            self.held = self._next
            return self._sizes[self._layer]
        if opcode is Opcode.LOAD_WEIGHTS and self.held == self._layer:
            self.held = None
            return self._sizes[self._layer - 1]
        return 0


def simulate_step(
    table: DrsTable, registers: Sequence[int], held: int | None = None, *, capacity: int = CAPACITY
) -> tuple[DispatchTrace, ...]:
    """Return the traces of one decode forward: every layer in order, the prefetch buffer handed from each to the next.

    Args:
        registers: one Index Register per layer.
        held: layer in the prefetch buffer before the first; the last trace's `held` starts the next forward.
    """
    traces = []
    for layer, register in enumerate(registers):
        traces.append(simulate(table, layer, register, held=held, capacity=capacity))
        held = traces[-1].held
    return tuple(traces)


def _is_issued(instruction: Instruction, register: int) -> bool:
    match instruction.opcode:
        case Opcode.LOAD_WEIGHTS:
            return register != 0
        case Opcode.COMPUTE_MLP:
            return bool(register >> instruction.row & 1)
        case Opcode.REPLAY_COPY:
            return not register >> instruction.row & 1
        case Opcode.PREFETCH_NEXT:
            return register == 0
        case _:
            return True


def _record(instruction: Instruction, mapping: tuple[Place, ...], argument: int) -> DispatchRecord:
    if instruction.row == NONE:
        return DispatchRecord(instruction.opcode, None, None, None, argument)
    place = mapping[instruction.row] if instruction.opcode is Opcode.COMPUTE_MLP else (None, None)
    return DispatchRecord(instruction.opcode, instruction.row, *place, argument)
