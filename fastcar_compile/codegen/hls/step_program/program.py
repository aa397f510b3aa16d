"""The program of a control table: its words, JSON, reader (docs/reference/drs_table.md)."""

import re
import struct
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar, get_type_hints

from fastcar_compile.codegen.hls.control_table import reader, table
from fastcar_compile.codegen.hls.control_table.reader import Header, header_of, require
from fastcar_compile.codegen.hls.control_table.simulator import CHAIN, RESULT_WORDS, SCORES
from fastcar_compile.codegen.hls.control_table.table import PROGRAM_WORDS, DrsTable, Limits, TableStatus
from fastcar_compile.codegen.hls.step_program import replaying as replaying  # which declares instructions, too
from fastcar_compile.codegen.hls.step_program.cache_layout import ACTIVE_BIT, NO_STEP, SIZE_RULES, Sizes
from fastcar_compile.codegen.hls.step_program.instruction import (
    DECLARED,
    FUNCTIONS,
    GAIN_WORDS,
    Instruction,
    Place,
    field_notes,
    rules_of,
)
from fastcar_compile.codegen.hls.step_program.instructions import End, Load
from fastcar_compile.errors import UserError
from fastcar_compile.gates.draft import GAINS
from fastcar_compile.gates.registry import GateKind

KINDS = dict(sorted(DECLARED.items()))
"""Instructions by their opcodes."""

# Instructions from their words, and the number of every word for C++.


def decode(words: tuple[int, ...]) -> Instruction | None:
    """Return the instruction of these words; None: an unknown opcode, place or gate, or more words than its own."""
    kind = KINDS.get(words[0] & 0xFF)
    # Byte 1 of the first word is reserved; a set bit there is from a newer format.
    if kind is None or words[0] >> 8 & 0xFF:
        return None
    types = _types(kind)
    given, rest = words[1 : len(types) + 1], words[len(types) + 1 :]
    named = [(wanted, word) for wanted, word in zip(types, given, strict=True) if issubclass(wanted, IntEnum)]
    # Words behind the fields have to be zero: one instruction has one encoding, and so one CRC.
    if any(rest) or any(word not in list(wanted) for wanted, word in named):
        return None
    return kind(words[0] >> 16, *(_value(wanted, word) for wanted, word in zip(types, given, strict=True)))


@cache
def _types(kind: type[Instruction]) -> tuple[type, ...]:
    """Return the types of the fields behind `layer`."""
    hints = get_type_hints(kind)
    return tuple(hints[name] for name in field_notes(kind))


def _value(kind: type, word: int) -> Any:
    return struct.unpack("<f", struct.pack("<I", word))[0] if kind is float else kind(word)


Constants = dict[str, int]
Kind = TypeVar("Kind", bound=Instruction)

TABLE_LIMITS = (
    *("MAGIC", "VERSION", "HEADER_WORDS", "PROGRAM_WORDS", "MAX_ROWS", "MAX_LAYERS", "MAX_TABLE_WORDS", "MAX_COUNT"),
    *("MAX_PRODUCTS", "MAX_CHAIN", "MAX_UNITS", "UNLIMITED", "COUPLE_CFG", "WEIGHTED"),
)
"""Names of `control_table/table.py` that the C++ sources have too."""


def cpp_format() -> dict[str, tuple[Constants, dict[str, Constants]]]:
    """Return numbers and enumerations of the C++ sources by namespace: of the table, and of its program."""
    limits = {name: getattr(table, name) for name in TABLE_LIMITS}
    limits |= {f"GATE_{kind.name}": kind.value for kind in GateKind}
    fields = {f"F_{name.upper()}": number for number, name in enumerate(Header._fields)}
    own = {
        "NO_STEP": NO_STEP,
        "ACTIVE_BIT": ACTIVE_BIT,
        "GAINS": GAINS,
        "GAIN_WORDS": GAIN_WORDS,
    }
    enums = {"StepOpcode": {f"OP_{kind.name}": opcode for opcode, kind in KINDS.items()}}
    enums["Place"] = {f"{place.name}_ROWS": place.value for place in Place}
    for kind in KINDS.values():
        names = [*map(str.upper, field_notes(kind)), "WORDS"]
        enums[f"{kind.__name__}Field"] = {f"{kind.name}_{name}": number for number, name in enumerate(names, 1)}
    enums |= {kind.__name__: {one.name: one.value for one in kind} for kind in (StepOp, StepStatus)}
    statuses = {status.name: status.value for status in TableStatus}
    answer = {"R_STATUS": 0, "R_INDEX_REGISTER": 1, "R_SCORES": SCORES, "R_CHAIN": CHAIN, "ANSWER_WORDS": RESULT_WORDS}
    return {"drs": (limits, {"Field": fields, "Status": statuses, "ResultWord": answer}), "step": (own, enums)}


_WORDS = {"and": "&&", "or": "||", "not": "!"}


def cpp_checks() -> dict[str, Any]:
    """Return what fastcar_step_program.hpp is rendered from: names of the sizes, the checks of them and of each instruction.

    C++ has 64 bits, which hold every product of what was counted.
    """
    checks = {kind.name: [_cpp(rule, kind) for rule in rules_of(kind)] for kind in KINDS.values()}
    sizes = [field.name for field in fields(Sizes)]
    return {"sizes": sizes, "size_checks": [_cpp(rule) for rule in SIZE_RULES], "checks": checks}


def _cpp(rule: str, kind: type[Instruction] | None = None) -> str:
    """Return a rule of the sizes, or of an instruction `f`."""
    own = {} if kind is None else {name: f"wide(f.word[{kind.name}_{name.upper()}])" for name in field_notes(kind)}

    def word(found: re.Match[str]) -> str:
        name, call = found.groups()
        if call:
            return f"{name}({'' if name in FUNCTIONS else 'sizes, '}"
        return _WORDS.get(name) or own.get(name) or f"sizes.{name}"

    return re.sub(r"([a-z]\w*)(\()?", word, rule).replace("//", "/")


class StepOp(IntEnum):
    """Values of the kernel's argument `op`."""

    LOAD = 0
    RUN = 1


class StepStatus(IntEnum):
    """How a step ended; the kernel writes it into its report."""

    DONE = 0
    NOT_LOADED = 1
    """There is no program, or the entry is no beginning."""
    NOT_HELD = 2
    """An instruction needs more than the kernel has, or the controller refused it."""
    BAD_ROW = 3
    """An active row is of a video that there is not, or sees positions that the cache has not; the number is the row's."""


@dataclass(frozen=True)
class StepProgram:
    """A decode step, or short programs: END is the last instruction."""

    sizes: Sizes
    instructions: tuple[Instruction, ...]

    @property
    def whole(self) -> bool:
        """Whether it is a decode step with its rows on chip; else short programs, whose rows are in memory."""
        return isinstance(self.instructions[0], Load)

    def every(self, kind: type[Kind]) -> dict[int, Kind]:
        """Return the instructions of a kind by their numbers, in order."""
        return {number: one for number, one in enumerate(self.instructions) if isinstance(one, kind)}

    def to_bytes(self, table: DrsTable) -> bytes:
        """Return the binary form with the table of the same rows; same program, same bytes."""
        return table.to_bytes(astuple(self.sizes)[1:], [word for i in self.instructions for word in i.words])

    def to_json(self) -> dict[str, Any]:
        """Return the same content as plain values."""
        return {**vars(self.sizes), "instructions": [i.to_json() for i in self.instructions]}


def check(data: bytes, limits: Limits | None = None) -> TableStatus:
    """Return the first check of a control table and its program that fails, or OK."""
    status = reader.check(data, limits)
    if status is not TableStatus.OK or not header_of(data).instructions:
        return status
    if not _sizes(data).is_valid():
        return TableStatus.BAD_HEADER
    return TableStatus.BAD_INSTRUCTION if _instructions(data) is None else TableStatus.OK


def _sizes(data: bytes) -> Sizes:
    header = header_of(data)
    return Sizes(header.rows, *header.program_sizes)


def _instructions(data: bytes) -> tuple[Instruction, ...] | None:
    """Return the instructions of a program whose header is checked; None where one is not valid."""
    sizes, found = _sizes(data), list[Instruction]()
    for words in struct.iter_unpack(f"<{PROGRAM_WORDS}I", data[4 * header_of(data).program_word :]):
        instruction = decode(words)
        if instruction is None or not instruction.fits(sizes):
            return None
        found.append(instruction)
    # END stands last, so every launch meets one.
    return tuple(found) if isinstance(found[-1], End) else None


def read_program(data: bytes) -> StepProgram:
    """Read and check the program of a control table.

    Raises:
        UserError: it is damaged, of another version, or has no program; the text names the check that failed.
    """
    require(data, check(data))
    instructions = _instructions(data) if header_of(data).instructions else None
    if instructions is None:
        raise UserError("the control table has no program", hint="compile the model again")
    return StepProgram(_sizes(data), instructions)
