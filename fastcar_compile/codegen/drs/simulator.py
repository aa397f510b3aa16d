"""Dynamic Resource Scheduling in Python: what the HLS controller must dispatch, record by record."""

from __future__ import annotations

from dataclasses import dataclass

from fastcar_compile.codegen.drs.table import (
    MAX_CORES,
    NONE,
    DrsTable,
    Instruction,
    Opcode,
    Status,
    check,
    layer_program,
    words_of,
)


@dataclass(frozen=True)
class DispatchRecord:
    """One dispatched instruction; row or core is None where the instruction has none."""

    opcode: Opcode
    row: int | None
    core: int | None

    @property
    def word(self) -> int:
        """The record as the controller writes it: opcode << 24 | row << 16 | core << 8, 0xFF for none."""
        row, core = (NONE if value is None else value for value in (self.row, self.core))
        return self.opcode << 24 | row << 16 | core << 8

    @classmethod
    def from_word(cls, word: int) -> DispatchRecord:
        """The record of such a word."""
        row, core = word >> 16 & NONE, word >> 8 & NONE
        return cls(Opcode(word >> 24), None if row == NONE else row, None if core == NONE else core)


@dataclass(frozen=True)
class DispatchTrace:
    """What one layer's scheduling did.

    Args:
        status: OK, or why nothing (QUEUE_FULL: not everything) was dispatched.
        records: in the order of dispatch.
        mapping: core of each row; a replayed row's Mapping Register is 0. Empty unless the table was readable.
    """

    status: Status
    records: tuple[DispatchRecord, ...] = ()
    mapping: tuple[int, ...] = ()


def map_rows(index_register: int, rows: int, cores: int) -> tuple[int, ...]:
    """Mapping Registers: the rows that compute go round-robin over the cores, in row order."""
    mapping, computing = [0] * rows, 0
    for row in range(rows):
        if index_register >> row & 1:
            mapping[row] = computing % cores
            computing += 1
    return tuple(mapping)


def simulate(
    table: DrsTable | bytes, layer: int, index_register: int, *, max_cores: int = MAX_CORES, capacity: int = 128
) -> DispatchTrace:
    """Schedule one layer.

    Args:
        table: a table, or its bytes (then they are checked, and a fault is a status, not an exception).
        index_register: bit b = 1: row b computes; bits at or beyond the table's rows are ignored.
        max_cores: cores of the hardware; a table that names more has status BAD_HEADER.
        capacity: records that the queue holds.
    """
    data = table if isinstance(table, bytes) else table.to_bytes()
    status = check(data, max_cores)
    if status is not Status.OK:
        return DispatchTrace(status)
    words = words_of(data)
    layers, rows, cores = words[4:7]
    if not 0 <= layer < layers:
        return DispatchTrace(Status.BAD_LAYER)
    program = layer_program(words, layer)
    if program is None:
        return DispatchTrace(Status.BAD_INSTRUCTION)
    register = index_register & (1 << rows) - 1
    mapping = map_rows(register, rows, cores)
    issued = [i for i in program[:-1] if _is_issued(i, register)]
    records = tuple(_record(i, mapping) for i in issued[:capacity])
    return DispatchTrace(Status.QUEUE_FULL if len(issued) > capacity else Status.OK, records, mapping)


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


def _record(instruction: Instruction, mapping: tuple[int, ...]) -> DispatchRecord:
    if instruction.row == NONE:
        return DispatchRecord(instruction.opcode, None, None)
    core = mapping[instruction.row] if instruction.opcode is Opcode.COMPUTE_MLP else None
    return DispatchRecord(instruction.opcode, instruction.row, core)
